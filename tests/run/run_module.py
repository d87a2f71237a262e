"""What `python -m hf_zero.run` does, as a file that `launch_forked` can start."""

from hf_zero.integrations.unmodified import main

main()
