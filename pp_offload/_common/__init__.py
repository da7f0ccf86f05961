"""Checks of arguments, processes, threads and other helpers for every folder."""
