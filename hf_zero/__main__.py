"""`python -m hf_zero`: the command `hf-zero`."""

from .cli.app import main

if __name__ == "__main__":
    main()
