"""Exit codes of `kvferry generate`, besides 0 and those of a signal (see `interruption`)."""

SOME_FAILED = 1
NOTHING_RAN = 2
