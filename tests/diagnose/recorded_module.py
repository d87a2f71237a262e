"""What each rank of `hf-zero parity` runs, as a file that `run_forked` can start."""

from hf_zero.diagnose.recorded import main

main()
