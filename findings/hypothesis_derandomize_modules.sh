#!/usr/bin/env bash
# With derandomize=True, the examples that Hypothesis draws depend on which modules of one's own are loaded at that time.
#
# Version: hypothesis 6.170.17 (since 6.131). Integers, floats and texts are drawn now and then from the constants in the
# source of all loaded modules that are not installed in site-packages. `derandomize` fixes the seed alone. So a test
# that draws nothing of another module draws other examples once that module is imported: after a change elsewhere, if
# it runs alone, or under pytest-xdist, where the tests that ran before it in its worker differ from run to run.
#
# Seen 2026-11-28:
#   the same process twice, the same examples: True
#   one more import, the same examples: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet hypothesis==6.170.17
echo 'PRIME = 1_000_000_007' > "$work/unrelated.py"
cat > "$work/draws.py" <<'EOT'
import hashlib
import sys

from hypothesis import given, settings, strategies

if "import" in sys.argv:
    import unrelated  # noqa: F401
found = []


@settings(derandomize=True, database=None, max_examples=300)
@given(strategies.integers(), strategies.text(max_size=8))
def test(number, text):
    found.append((number, text))


test()
print(hashlib.sha256(repr(found).encode()).hexdigest())
EOT
cd "$work"
first=$(venv/bin/python draws.py) again=$(venv/bin/python draws.py) other=$(venv/bin/python draws.py import)
echo "the same process twice, the same examples: $([ "$first" = "$again" ] && echo True || echo False)"
echo "one more import, the same examples: $([ "$first" = "$other" ] && echo True || echo False)"
[ "$first" = "$again" ] && [ "$first" != "$other" ]
