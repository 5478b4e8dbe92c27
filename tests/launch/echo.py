"""Says its words, a line each."""

import sys

print(*sys.argv[1:], sep="\n")
