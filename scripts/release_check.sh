#!/usr/bin/env bash
# Prints one line for each promise of a release that files can show, and fails if one does not hold. Builds the wheel twice.
# `bash scripts/release_check.sh`; zizmor and build are in .github/release-requirements.txt.
set -uo pipefail
cd "$(dirname "$0")/.."
python="$(command -v python || command -v python3)"
failed=0

row() { # name, then a command that succeeds if the promise holds; its last line of output is shown
    local name="$1" said
    shift
    if said="$("$@" 2>&1)"; then
        printf '%-24s holds   %s\n' "$name" "$(tail -n 1 <<<"$said")"
    else
        printf '%-24s FAILS   %s\n' "$name" "$(tail -n 1 <<<"$said")"
        failed=$((failed + 1))
    fi
}

no_binaries() { ! git ls-files | grep -E '\.(so|o|a|dll|exe|jar|whl|pyc|pyd|class)$' && echo "no binary is tracked"; }

no_dangerous_triggers() {
    ! grep -nE 'pull_request_target|workflow_run|github\.event\.(issue|pull_request|comment)' .github/workflows/*.yml &&
        zizmor --offline --quiet .github >/dev/null && echo "zizmor finds nothing in the workflows"
}

least_permissions() {
    local file
    for file in .github/workflows/*.yml; do
        grep -qE '^permissions: \{contents: read\}' "$file" || { echo "$file has other permissions at its top"; return 1; }
    done
    echo "each workflow reads only; jobs that write say so"
}

pinned() {
    local loose
    loose="$(grep -hE '^\s*(- )?uses:' .github/workflows/*.yml | grep -vE '@[0-9a-f]{40} # v[0-9]')" && { echo "$loose"; return 1; }
    [ "$(grep -c '==' .github/release-requirements.txt)" -gt 0 ] && grep -q 'sha256:' .github/release-requirements.txt &&
        echo "$(grep -cE '^\s*(- )?uses:' .github/workflows/*.yml | awk -F: '{n += $2} END {print n}') actions by SHA, build tools by hash"
}

updates() { grep -q 'package-ecosystem: github-actions' .github/dependabot.yml && echo "dependabot renews actions and build tools"; }

analysis() { grep -q 'codeql-action/analyze@' .github/workflows/security.yml && echo "CodeQL on each pull request"; }

policy() { grep -q '^## Supported versions' .github/SECURITY.md && grep -q 'private advisory' .github/SECURITY.md && echo "SECURITY.md"; }

license() { grep -q 'Apache License' LICENSE && grep -q '^license = "Apache-2.0"' pyproject.toml && echo "Apache-2.0"; }

fuzzed() { git grep -l 'from hypothesis import' -- tests | wc -l | xargs printf '%s test files with generated inputs\n'; }

published() { grep -q 'gh-action-pypi-publish@' .github/workflows/release.yml && echo "by a trusted publisher, from the tag's workflow"; }

attested() {
    grep -q 'id-token: write' .github/workflows/release.yml && ! grep -rqE 'attestations: false|PYPI_(API_)?TOKEN|twine upload' .github &&
        echo "attestations, no stored token"
}

owned() { grep -qE '^\* @' .github/CODEOWNERS && echo "CODEOWNERS"; }

promised() { grep -q '^## Deprecations' docs/versions.md && echo "docs/versions.md has the upgrade promise"; }

versions() {
    local version
    version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
    grep -q "^version: $version$" CITATION.cff && grep -qF "## [$version]" CHANGELOG.md && grep -q "__version__ = \"$version\"" hf_zero/versions.py &&
        echo "$version in all four files"
}

not_told_to_install() {
    # The name is not ours on the registry yet. Delete this row once it is.
    ! git grep -nE "pip install ['\"]?hf[-_]zero" -- ':!tests' ':!CHANGELOG.md' ':!scripts/release_check.sh' && echo "no text installs the name from the registry"
}

reproducible() { # two builds in two folders make the same bytes, and the wheel has its bill of materials
    local work first
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' RETURN
    for copy in one two; do
        mkdir -p "$work/$copy/tree"
        git ls-files -z | xargs -0 tar c --ignore-failed-read 2>/dev/null | tar x -C "$work/$copy/tree"
        (cd "$work/$copy/tree" && SOURCE_DATE_EPOCH=1700000000 "$python" -c "
from setuptools.build_meta import build_wheel
build_wheel('$work/$copy')") >"$work/log" 2>&1 || { tail -n 1 "$work/log"; return 1; }
    done
    first="$(ls "$work"/one/*.whl)"
    cmp "$first" "$work"/two/*.whl && "$python" -m zipfile -l "$first" | grep -q 'sboms/hf_zero.cdx.json' &&
        echo "sha256 $(sha256sum "$first" | cut -c1-16)..., with sboms/hf_zero.cdx.json"
}

row "Binary-Artifacts" no_binaries
row "Dangerous-Workflow" no_dangerous_triggers
row "Token-Permissions" least_permissions
row "Pinned-Dependencies" pinned
row "Dependency-Update-Tool" updates
row "SAST" analysis
row "Security-Policy" policy
row "License" license
row "Fuzzing" fuzzed
row "Packaging" published
row "Signed-Releases" attested
row "Code owners" owned
row "SBOM, reproducible" reproducible
row "Upgrade promise" promised
row "Versions agree" versions
row "Name on the registry" not_told_to_install
exit "$((failed > 0))"
