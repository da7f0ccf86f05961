"""The faults of engines elsewhere, planted into this one: for a row of the field table, one of these.

Those of the other rows are in ``faults.py``. So there is no row whose tests cannot fail.
"""

from __future__ import annotations

from runner import Mutant

FIELD = "tests/field"

FIELD_MUTANTS = [
    Mutant(
        "a copy does not know when it was made",
        "pp_offload/_transfer/ticket.py",
        "self.offloaded = self.buffer.last_use = offloaded",
        "self.buffer.last_use = offloaded",
        "a reload reads a host buffer before the offload has filled it",
        (f"{FIELD}/test_read_before_filled.py::test_first_iteration",),
        row="F01",
    ),
    Mutant(
        "host memory given back while it is read",
        "pp_offload/_transfer/copies.py",
        "copy.buffer.last_use = reloaded",
        "copy.buffer.last_use = copy.loan = None",
        "the next offload writes a host buffer that a reload has still to read",
        (f"{FIELD}/test_written_before_read.py::test_no_byte_to_spare",),
        row="F02",
    ),
    Mutant(
        "views of one storage taken for the first of them",
        "pp_offload/_transfer/payload.py",
        "Geometry.of(_source(one))",
        "Geometry.of(_source(saved[0]))",
        "each view at an address has size, strides and dtype of the first",
        (f"{FIELD}/test_views_at_one_address.py::test_each_pair_of_views",),
        row="F04",
    ),
    Mutant(
        "memory of what was used up is used again",
        "pp_offload/_transfer/pending_reloads.py",
        "        if self._device_copies.get(device_copy.where) is device_copy:\n",
        '        before, self._used = getattr(self, "_used", None), device_copy.tensor\n'
        "        if before is not None:\n"
        "            before.data.zero_()\n"
        "        if self._device_copies.get(device_copy.where) is device_copy:\n",
        "a gradient that is a view of what came back is overwritten",
        (f"{FIELD}/test_views_of_what_came_back.py::test_backward_gives_a_view",),
        row="F06",
    ),
    Mutant(
        "what was gathered is not waited for",
        "pp_offload/_transfer/copies.py",
        "        for stream in streams:\n            self._d2h_waits_for_compute(stream)",
        "        for stream in () if any(t.storage is None for t in tickets) else streams:\n"
        "            self._d2h_waits_for_compute(stream)",
        "the contiguous copy of a view leaves before compute has made it",
        (f"{FIELD}/test_helper_copies.py::test_views",),
        row="F08",
    ),
    Mutant(
        "released whoever shares it",
        "pp_offload/_groups/forced_release.py",
        "if others > 0:",
        "if False:",
        "a sibling of the view that a user names is emptied with it",
        (f"{FIELD}/test_release_of_siblings.py::test_the_sibling_is_read_later",),
        row="F09",
    ),
    Mutant(
        "views of parameters come back as parameters",
        "pp_offload/_slices/saved_parameters.py",
        "view = self._geometry.on_storage_of(tensor)",
        "view = tensor",
        "a model in slices multiplies by a weight where the whole one does by its transpose",
        (
            f"{FIELD}/test_model_in_slices.py::test_as_the_whole_model[cpu-1-kept-two_forwards_two_backwards]",
        ),
        row="F11",
    ),
    Mutant(
        "groups without grad",
        "pp_offload/_groups/manager.py",
        "        if not torch.is_grad_enabled():\n            self.forward",
        "        if False:\n            self.forward",
        "the plan is for microbatches that no backward came for",
        (f"{FIELD}/test_passes_without_grad.py::test_same_plan_and_bytes",),
        row="F14",
    ),
    Mutant(
        "a step without backward ends the plan",
        "pp_offload/_groups/manager.py",
        "            if self.step.is_complete():\n                self.learn()\n",
        "            if self.step.is_complete():\n"
        "                self.learn()\n"
        "            else:\n"
        "                self.wiring.plan = type(self.wiring.plan)()\n",
        "after a validation other groups leave",
        (f"{FIELD}/test_validation_between_steps.py::test_without_grad",),
        row="F15",
    ),
    Mutant(
        "a group keeps what autograd drops",
        "pp_offload/_groups/group.py",
        "self._tickets = [weakref.ref(ticket) for ticket in tickets]",
        "self._tickets = [lambda one=ticket: one for ticket in tickets]",
        "what backward never asks for stays on the host until the next step",
        (f"{FIELD}/test_never_unpacked.py::test_never_unpacked[late-unused_branch-8-16]",),
        row="F17",
    ),
    Mutant(
        "hooks stay where a forward raises",
        "pp_offload/_megatron/interface.py",
        "        self._hooks.leave()\n",
        "        if not any(args):\n            self._hooks.leave()\n",
        "what is saved after a step that was aborted goes to a group of it",
        (f"{FIELD}/test_aborted_steps.py::test_aborted_step",),
        row="F18",
    ),
    Mutant(
        "the group started last is committed",
        "pp_offload/_groups/chunk.py",
        "            if group.name == name:\n                break",
        "            if group:\n                break",
        "of two groups that interleave each is closed in place of the other",
        (f"{FIELD}/test_interleaved_groups.py::test_each_group_keeps_its_own",),
        row="F19",
    ),
    Mutant(
        "bytes behind the group in backward are dropped",
        "pp_offload/_groups/step.py",
        "        if chunk is not None:\n            self.begin_chunk(chunk)",
        "        if chunk is not None:\n"
        "            for later in chunk.groups[group.key.position + 1 :]:\n"
        "                for ticket in later.waiting():\n"
        "                    ticket.copy = None\n"
        "            self.begin_chunk(chunk)",
        "a backward that visits groups in another order finds nothing",
        (f"{FIELD}/test_backward_in_any_order.py::test_groups_in_every_order",),
        row="F20",
    ),
    Mutant(
        "microbatches that the plan does not know stay",
        "pp_offload/_groups/plan.py",
        "        return key in self.kept and self.names",
        "        if self.names and key.chunk not in self.names:\n"
        "            return True\n"
        "        return key in self.kept and self.names",
        "of more microbatches than the first step had, the others are not offloaded",
        (f"{FIELD}/test_more_microbatches.py::test_number_of_microbatches_changes",),
        row="F21",
    ),
    Mutant(
        "a rank without groups gathers nothing",
        "pp_offload/summary.py",
        "    if not (dist.is_available() and dist.is_initialized()):\n        return [dict(mine)]",
        "    if not (mine and dist.is_available() and dist.is_initialized()):\n"
        "        return [dict(mine)]",
        "the other ranks wait for it",
        (f"{FIELD}/test_summary_over_ranks.py::test_summary_does_not_hang",),
        row="F22",
    ),
    Mutant(
        "memory of others is released",
        "pp_offload/_groups/forced_release.py",
        "if not storage.resizable() or (",
        "if False and (",
        "an array of NumPy, or what another process shares, is emptied",
        (f"{FIELD}/test_memory_of_others.py::test_is_skipped_with_one_warning",),
        row="F23",
    ),
    Mutant(
        "a marker is a node of the graph",
        "pp_offload/_megatron/interface.py",
        '    _start("group" if name is None or name == "" else name)\n    return tensor',
        "    from pp_offload._megatron.markers import FineGrainedOffloadingGroupStartFunction\n\n"
        "    chunk = PipelineOffloadManager.get_instance().cur_forward_chunk()\n"
        "    return FineGrainedOffloadingGroupStartFunction.apply(tensor, chunk, name)",
        "what it gives back cannot be changed in place",
        (f"{FIELD}/test_marker_output_changed.py::test_marker_output_changed_in_place",),
        row="F25",
    ),
    Mutant(
        "hooks stay where offload was disabled",
        "pp_offload/_megatron/interface.py",
        "        self._hooks.leave()\n",
        "        if PipelineOffloadManager.get_instance().wiring.is_enabled:\n"
        "            self._hooks.leave()\n",
        "what is saved behind a group goes to it",
        (f"{FIELD}/test_switched_off_and_on.py::test_switched_in_a_scope",),
        row="F26",
    ),
    Mutant(
        "groups while a compiler traces",
        "pp_offload/_groups/manager.py",
        "        if torch.compiler.is_compiling():\n            return None\n",
        "",
        "the compiler looks into the engine, and gives up",
        (f"{FIELD}/test_compiled_code.py::test_a_whole_model_with_markers_inside",),
        row="F27",
    ),
    Mutant(
        "what a forward left is not sent by the next",
        "pp_offload/_groups/stash.py",
        "        self.send()\n        with self._wiring.lock:",
        "        self._forward.open = None\n        with self._wiring.lock:",
        "each microbatch in flight leaves its last tensors on the device",
        (f"{FIELD}/test_context_in_flight.py::test_each_in_flight_is_on_the_host",),
        row="F29",
    ),
    Mutant(
        "sizes rounded up to powers of two",
        "pp_offload/_memory/slabs.py",
        "left = -(-nbytes // granule) * granule",
        "left = whole_slab_bytes(nbytes)",
        "up to half of the host memory is never used",
        (f"{FIELD}/test_rounded_up.py::test_requested_is_nearly_all_that_is_reserved",),
        row="F30",
    ),
    Mutant(
        "buffers of a size are kept for that size",
        "pp_offload/_memory/bins.py",
        "list(islice(self._oldest_first, FEW))",
        "[]",
        "host memory grows with every length that comes by",
        (
            f"{FIELD}/test_random_lengths.py::test_random_lengths_hold_no_more_than_the_largest_step[40-cpu]",
        ),
        row="F31",
    ),
    Mutant(
        "slabs dropped where they are fitted",
        "pp_offload/_memory/host.py",
        "                self._replace_slabs(sizes)",
        "                self._drop_slabs()",
        "the second step asks the system for all host memory again",
        (f"{FIELD}/test_allocated_every_step.py::test_no_allocation_after_the_first_step",),
        row="F33",
    ),
    Mutant(
        "what another group sent is not looked for",
        "pp_offload/_transfer/deduplication.py",
        "entry = None if storage is None else self._entries.get(storage._cdata)",
        "entry = None",
        "an activation that several groups save is copied by each",
        (f"{FIELD}/test_saved_several_times.py::test_one_copy",),
        row="F34",
    ),
    Mutant(
        "verify watches nothing",
        "pp_offload/_transfer/verify.py",
        "            if ticket.storage is not None:",
        "            if False:",
        "nobody is told which reference keeps the bytes on the device",
        (f"{FIELD}/test_second_references.py::test_a_leaf_stays_and_is_reported",),
        row="F36",
    ),
    Mutant(
        "the window counts only what it brings now",
        "pp_offload/_groups/prefetch.py",
        "        room = self._window_bytes - self._transfer.reloaded_bytes\n        batches",
        "        room = self._window_bytes\n        batches",
        "more than the window is on the device, and nobody uses it yet",
        (f"{FIELD}/test_reload_window.py::test_never_more_than_the_window",),
        row="F37",
    ),
    Mutant(
        "outputs to offload are saved",
        "pp_offload/_checkpoint/selective.py",
        "if choice is Choice.OFFLOAD:",
        "if False:",
        "what a selective checkpoint keeps passes no hook, and stays on the device",
        (f"{FIELD}/test_outputs_past_the_hooks.py::test_outputs_are_offloaded_or_counted",),
        row="F38",
    ),
    Mutant(
        "views without their offset",
        "pp_offload/_transfer/tensors.py",
        "offset = self.compact_offset()",
        "offset = 0",
        "a view comes back at the begin of its storage, and kernels take another path",
        (f"{FIELD}/test_strides_and_offsets.py::test_view",),
        row="F40",
    ),
    Mutant(
        "parameters that are subclasses leave",
        "pp_offload/_transfer/tensors.py",
        "                self.kept.add(tensor)\n            return False\n        if tensor.layout",
        "                pass\n            return False\n        if tensor.layout",
        "what a DTensor parameter holds is copied to the host",
        (f"{FIELD}/test_subclasses.py::test_dtensor_parameters_stay",),
        row="F41",
    ),
    Mutant(
        "tensors of any device leave",
        "pp_offload/_transfer/tensors.py",
        "if tensor.device != self._device or tensor.is_quantized:",
        "if tensor.is_quantized:",
        "what was saved on another device comes back on this one",
        (f"{FIELD}/test_mixed_devices.py::test_mixed_saves",),
        row="F42",
    ),
    Mutant(
        "bytes dropped when they are used up",
        "pp_offload/_transfer/pending_reloads.py",
        "ticket.pending_reload = None",
        "ticket.pending_reload = ticket.copy = None",
        "the gradients of weights, which come later, find no host copy",
        (f"{FIELD}/test_late_weight_gradients.py::test_weight_pass_delayed",),
        row="F43",
    ),
    Mutant(
        "idle groups are named in every step",
        "pp_offload/_groups/idle_groups.py",
        "                self._said.add(name)\n",
        "",
        "the warning comes as often as there are steps",
        (f"{FIELD}/test_groups_that_do_nothing.py::test_each_idle_name_once",),
        row="F44",
    ),
    Mutant(
        "bound to one core",
        "pp_offload/_common/workers.py",
        "            thread.start()\n",
        "            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "            thread.start()\n",
        "the thread that trains is on one core, wherever the launcher had put it",
        (f"{FIELD}/test_affinity.py::test_affinity_is_as_it_was",),
        row="F45",
    ),
    Mutant(
        "losses computed outside of the context",
        "pp_offload/integrations/huggingface.py",
        "            stack.enter_context(offload)",
        "            pass",
        "a trainer that is told to offload does not",
        (f"{FIELD}/test_hugging_face_trainer.py::test_same_bits[late-full-kept-tied]",),
        row="F46",
    ),
    Mutant(
        "views of parameters leave",
        "pp_offload/_transfer/tensors.py",
        "if base is not None and isinstance(base, Parameter):",
        "if False:",
        "the transpose that a linear layer saves of its weight is copied to the host",
        (f"{FIELD}/test_parameters_stay.py::test_linear_without_being_told",),
        row="F47",
    ),
    Mutant(
        "prefetch ends with the microbatch",
        "pp_offload/_groups/step.py",
        "for following in self.queue.certain():",
        "for following in ():",
        "each backward waits for the first group it comes to",
        (f"{FIELD}/test_input_without_grad.py::test_input_without_grad[cpu-4-LoRA]",),
        row="F48",
    ),
    Mutant(
        "what came for another microbatch",
        "pp_offload/_transfer/pending_reloads.py",
        "self._device_copies.get(ticket.where)\n"
        "        if (\n"
        "            device_copy is None\n"
        "            or device_copy.copy() is not ticket.copy",
        "next(\n"
        "            (one for one in self._device_copies.values() if one.nbytes == ticket.nbytes), None\n"
        "        )\n"
        "        if (\n"
        "            device_copy is None",
        "backward computes with a tensor of the same size that another microbatch saved",
        (f"{FIELD}/test_order_of_microbatches.py::test_order_of_backward",),
        row="F49",
    ),
    Mutant(
        "a node's own output is kept",
        "pp_offload/_transfer/saved_tensor.py",
        "self.source: Tensor | None = tensor.detach()",
        "self.source: Tensor | None = tensor",
        "what a node gave out is given back as saved, and keeps the node alive",
        (f"{FIELD}/test_promises_of_hooks.py::test_saved_output_belongs_to_its_node",),
        row="F50",
    ),
    Mutant(
        "the outermost group takes all",
        "pp_offload/_megatron/interface.py",
        "Saving(chunk.pack, self._group)",
        "Saving(chunk.pack, chunk.open_groups[0])",
        "what is saved in a group inside another leaves with that one",
        (f"{FIELD}/test_scopes_in_scopes.py::test_every_tensor_leaves_with_the_innermost_group",),
        row="F51",
    ),
    Mutant(
        "groups without a microbatch, with a schedule attached",
        "pp_offload/_groups/manager.py",
        "if chunk is None and not self.num_attached:",
        "if chunk is None:",
        "a schedule that runs its stages to infer shapes cannot begin",
        (f"{FIELD}/test_inferred_shapes.py::test_nothing_alive_after_a_step",),
        row="F52",
    ),
    Mutant(
        "what a group took in a region is not noted",
        "pp_offload/_groups/checkpoint_regions.py",
        "_Scope(name, took, len(frame.weak_holders))",
        "_Scope(name, False, len(frame.weak_holders))",
        "a checkpoint that runs again finds what the group had kept from it",
        (f"{FIELD}/test_groups_run_again.py::test_example",),
        row="F53",
    ),
    Mutant(
        "modules that run, of all threads in one list",
        "pp_offload/modules.py",
        "class _Running(threading.local):",
        "class _Running:",
        "an evaluation beside training closes its groups, or leaves hooks",
        (
            f"{FIELD}/test_evaluation_beside_training.py::test_evaluation_beside_training[modules-cpu-no_grad]",
        ),
        row="F55",
    ),
    Mutant(
        "a destructor of what autograd holds",
        "pp_offload/_transfer/saved_tensor.py",
        "    @property\n    def may_leave",
        "    def __del__(self) -> None:\n"
        "        self.ticket = None\n\n"
        "    @property\n"
        "    def may_leave",
        "what a signal handler raises where a graph dies is printed and lost",
        (f"{FIELD}/test_signals_in_backward.py::test_no_python_code_when_a_graph_dies",),
        row="F56",
    ),
    Mutant(
        "a step leaves what an interrupt passed by",
        "pp_offload/_groups/manager.py",
        "was_cut_off = leave_all()",
        "was_cut_off = False",
        "hooks of a forward that was cut off stay for the next step",
        (f"{FIELD}/test_interrupt_at_any_line.py::test_a_forward_cut_off",),
        row="F57",
    ),
]
