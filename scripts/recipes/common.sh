# shellcheck shell=bash
# Sourced by the recipes: goes to the checkout, finds its Python, and prepares data that is missing.
#
#   DATA         folder of the prepared data sets (default: data)
#   VIRTUAL_ENV  the active virtual environment; without one, .venv of the checkout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DATA=${DATA:-data}
python=${VIRTUAL_ENV:-.venv}/bin/python

die() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

[ -x "$python" ] || die "there is no $python: run 'make install' in $PWD, or activate a virtual environment"

# need_data NAME SPLIT...: makes $DATA/NAME/SPLIT.parquet from the published data set, unless all are there.
need_data() {
  local name=$1 split
  shift
  for split in "$@"; do
    if [ ! -f "$DATA/$name/$split.parquet" ]; then
      "$python" -m scripts.prepare_data "$name" --folder "$DATA" ||
        die "could not prepare $name. Offline, fetch it elsewhere and run: $python -m scripts prepare-data $name --source PATH --folder $DATA"
      return
    fi
  done
}

# has_own_sizes ARGUMENT...: whether the arguments choose a model that brings sizes for a machine without GPUs.
has_own_sizes() {
  case " $* " in
    *" model=tiny "* | *" model=small "*) return 0 ;;
    *) return 1 ;;
  esac
}
