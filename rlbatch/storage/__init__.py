"""Samples on disk: safetensors shards, written once and whole, mapped when read.

Write then read is the identity. Knows nothing of trainers or torch; other trainers' files come here later.
"""

from rlbatch.storage.opening import open_reader
from rlbatch.storage.reader import ShardReader
from rlbatch.storage.writer import ShardWriter, open_writer, write_shard

__all__ = ["ShardReader", "ShardWriter", "open_reader", "open_writer", "write_shard"]
