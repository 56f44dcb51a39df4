"""How much memory a few lines of Python take, in a process of their own."""

import subprocess
import sys
from pathlib import Path

STATUS = """
import sys, torch
from rlbatch_kernels import linear_logprobs, token_logprobs

backend = sys.argv[1]

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) / 1024
"""

IS_KNOWN = Path("/proc/self/status").exists()


def peak_mib(setup: str, case: str, backend: str) -> float:
    """Most MiB held while `case` runs, beyond what `setup` left; both see `backend`, torch and the ops."""
    code = f"{STATUS}\n{setup}\nbefore = status('VmRSS:')\n{case}\nprint(status('VmHWM:') - before)"
    done = subprocess.run([sys.executable, "-c", code, backend], capture_output=True, text=True, check=True)
    return float(done.stdout)
