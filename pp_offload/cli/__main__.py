"""``python -m pp_offload.cli``: the same as ``pp-offload``."""

from pp_offload.cli import main

if __name__ == "__main__":
    main()
