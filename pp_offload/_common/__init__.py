"""What every folder stands on: checks of arguments, processes, threads."""
