"""Ask the real trainers and keep what they say: python tests/parity/record.py PEER INTERPRETER."""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from parity.peer_io import to_json  # noqa: E402
from test_dialects_parity import ask, question  # noqa: E402

peer, python = sys.argv[1:]
content = {"question": to_json(question(peer)), "answer": ask(peer, python)}
path = TESTS / "data" / "parity" / f"{peer}.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(content, indent=None) + "\n")
print(peer, content["answer"])
