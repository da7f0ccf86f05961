"""The names that users of Megatron-LM call, of both generations, and the manager of the process."""
