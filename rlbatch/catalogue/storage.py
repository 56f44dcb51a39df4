"""Entries: what a file cannot be."""

from rlbatch.catalogue.entry import Entry

ENTRIES = (
    Entry(
        code="file-unusable",
        level="storage",
        severity="error",
        symptom="A file is missing, empty, or of a kind that cannot be read.",
        check="Opening it failed, or its contents are of no known kind.",
        likely="the path is wrong, or the file is not a rollout file",
        fix="give a shard, a directory of shards, a recorded rollout (.json) or .jsonl of those",
    ),
    Entry(
        code="write-failed",
        level="storage",
        severity="error",
        symptom="A shard was not written; nothing of it was left behind.",
        check="Every system call of a write is watched, and every value must be one that a shard can hold.",
        likely="the disk is full, or the directory may not be written to",
        fix="make room, or name another directory, and write again",
    ),
    Entry(
        code="shard-truncated",
        level="storage",
        severity="error",
        symptom="A shard is shorter or longer than its header says.",
        check="The header's offsets are compared with the file's size.",
        likely="the file was cut off in a copy; rlbatch itself never leaves part of a shard",
        fix="copy the shard again from where it was written",
    ),
    Entry(
        code="shard-altered",
        level="storage",
        severity="error",
        symptom="A shard's contents are not those that were written.",
        check="crc32 of every array against the header's, on its first whole read.",
        likely="the file was changed after it was written, or the disk failed",
        fix="copy the shard again from where it was written; never edit shards in place",
    ),
    Entry(
        code="schema-unknown",
        level="storage",
        severity="error",
        symptom="A safetensors file is not an rlbatch shard of a version that this release reads.",
        check="The header's schema name and version.",
        likely="another program's file, or a newer rlbatch wrote it",
        fix="read it with the rlbatch that wrote it, or give the rollouts themselves",
    ),
    Entry(
        code="store-changed",
        level="storage",
        severity="error",
        symptom="The shards of a store are not the ones that were written, or that were there before.",
        check="Numbers of shards and samples against shards.end, and the numbering, on opening; names, sizes "
        "and times of open shards before each step; checksums of headers on resuming.",
        likely="shards were removed, replaced or written in place, or two writers share a directory",
        fix="write each shard once, give each writer its own directory, and delete only what nobody reads",
    ),
    Entry(
        code="store-overdue",
        level="storage",
        severity="error",
        symptom="A store that is being written has got no further shard for too long.",
        check="The time since the last shard against the timeout; shards.end says that none will come.",
        likely="the sampler was killed or hangs, or the timeout is shorter than it takes to fill a shard",
        fix="look at the sampler, allow a longer timeout, or write smaller shards; the loader can resume",
    ),
    Entry(
        code="model-mismatch",
        level="storage",
        severity="error",
        symptom="The model or tokenizer at hand is not the one that the rollouts came from.",
        check="Stored tokenizer fingerprint and vocabulary size against those of the model directory.",
        likely="another checkpoint, or a tokenizer that was changed in between",
        fix="give the model directory that the engine served",
    ),
)
