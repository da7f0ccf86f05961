"""Checks of arguments, processes, threads and other things that every folder needs."""
