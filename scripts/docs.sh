#!/usr/bin/env bash
# Builds the site into build/site, without network once the extra `docs` is installed. A broken link or reference fails.
# `bash scripts/docs.sh serve` shows the site while pages are written.
set -euo pipefail
cd "$(dirname "$0")/.."
export DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=true
exec python -m mkdocs "${1:-build}" --strict --config-file scripts/mkdocs.yml "${@:2}"
