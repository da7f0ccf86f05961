"""Modules that stand in for those of other libraries, name by name.

import sys
import pp_offload.compat.megatron as ours

sys.modules["megatron.core.pipeline_parallel.fine_grained_activation_offload"] = ours
"""
