"""Ways to break the library that have happened to others, or could: each one edit of one line or two."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("tests/properties/test_collectives.py", "tests/comm/test_collectives.py")
LAYERS = ("tests/properties/test_modes.py", "tests/nn", "tests/models")
TRACE = ("tests/trace/test_debts.py", "tests/trace/test_refused.py", "tests/trace")
STEPS = (
    "tests/properties/test_norms.py",
    "tests/properties/test_ties.py",
    "tests/properties/test_schedules.py",
    "tests/test_step.py",
)
SCHEDULES = (
    "tests/pipeline/test_schedules.py",
    "tests/pipeline/test_verify.py",
    "tests/pipeline/test_simulate.py",
    "tests/pipeline/test_mutations.py",
    "tests/pipeline",
)
PIPELINE = (
    "tests/pipeline/test_execute.py",
    "tests/pipeline/test_routes.py",
    "tests/pipeline/test_equal.py",
    "tests/pipeline",
)
SHARDS = ("tests/test_restore.py", "tests/properties/test_maps.py", "tests/test_shards.py")
MAPS = ("tests/maps", "tests/transforms/test_own.py")
DEFERRED = ("tests/pipeline/test_deferred.py",)
PICTURES = ("tests/report",)


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        name: what is wrong, in a few words.
        file: within the package.
        old, new: the text that is replaced; ``old`` occurs once.
        tests: where the suite is expected to notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Collectives and their duals
    Mutant(
        "psum's transpose is psum (gradients tp times too large)",
        "comm/linear_maps.py",
        "return Vary(self.group)",
        "return Sum(self.group)",
        COLLECTIVES,
    ),
    Mutant(
        "pvary's transpose is the identity (nobody sums the cotangent)",
        "comm/linear_maps.py",
        "    def dual(self) -> LinearMap:\n        return Sum(self.group)",
        "    def dual(self) -> LinearMap:\n        return self",
        COLLECTIVES,
    ),
    Mutant(
        "all_gather: transposes of its two types swapped",
        "comm/linear_maps.py",
        "Slice(self.group, self.dim) if self.replicated else Scatter(self.group, self.dim)",
        "Scatter(self.group, self.dim) if self.replicated else Slice(self.group, self.dim)",
        COLLECTIVES,
    ),
    Mutant(
        "reduce_scatter's transpose gathers along another dim",
        "comm/linear_maps.py",
        "        return Gather(self.group, self.dim, replicated=False)",
        "        return Gather(self.group, 0, replicated=False)",
        COLLECTIVES,
    ),
    Mutant(
        "ppermute's transpose is not the inverse permutation",
        "comm/linear_maps.py",
        "tuple(self.to.index(i) for i in range(len(self.to)))",
        "self.to",
        COLLECTIVES,
    ),
    Mutant(
        "all_to_all's transpose keeps its dims",
        "comm/linear_maps.py",
        "Exchange(self.group, self.concat, self.split)",
        "Exchange(self.group, self.split, self.concat)",
        COLLECTIVES,
    ),
    Mutant(
        "take's transpose places the window at zero",
        "comm/linear_maps.py",
        "out.narrow(self.dim, self.start, self.length).copy_(x)",
        "out.narrow(self.dim, 0, self.length).copy_(x)",
        COLLECTIVES,
    ),
    Mutant(
        "all_gather in another order than the ranks",
        "comm/local.py",
        "return torch.cat(list(inputs), op.dim)",
        "return torch.cat(list(inputs)[::-1], op.dim)",
        COLLECTIVES,
    ),
    Mutant(
        "reduce_scatter averages",
        "comm/local.py",
        "return combine(AllReduce(), [_chunk(x, op.dim, index, len(inputs)) for x in inputs])",
        "return combine(AllReduce(), [_chunk(x, op.dim, index, len(inputs)) for x in inputs]) / len(inputs)",
        COLLECTIVES,
    ),
    # Layers
    Mutant(
        "row bias added on every rank before the sum",
        "nn/linear.py",
        "    y = to_stream(y, par, seq_dim)\n    return y if bias is None else y + bias",
        "    return to_stream(y if bias is None else y + bias, par, seq_dim)",
        LAYERS,
    ),
    Mutant(
        "row linear: the sum's pullback sums once more in ALL_REDUCE",
        "nn/stream.py",
        "        if ctx.seq_dim is None:\n            return cotangent, None, None\n",
        "        if ctx.seq_dim is None:\n            return ctx.group.start(AllReduce(), cotangent).wait(), None, None\n",
        LAYERS,
    ),
    Mutant(
        "row linear: the pullback gathers along the batch",
        "nn/stream.py",
        "        return ctx.group.start(AllGather(ctx.seq_dim), cotangent).wait(), None, None",
        "        return ctx.group.start(AllGather(0), cotangent).wait(), None, None",
        LAYERS,
    ),
    Mutant(
        "async column linear: the input gradient of the first of several weights alone",
        "nn/linear.py",
        "            grad = input_gradient(rows, weights, whole)\n            if layout.seq_dim",
        "            grad = input_gradient(rows[:1], weights[:1], whole)\n            if layout.seq_dim",
        LAYERS,
    ),
    Mutant(
        "async column linear: the input gradient is not summed over tp",
        "nn/stream.py",
        "    return group.start(op, partial, donate=True)",
        "    return Done(partial) if seq_dim is None else group.start(op, partial, donate=True)",
        LAYERS,
    ),
    Mutant(
        "embedding: every rank looks ids up from zero",
        "nn/embedding.py",
        '    local = ids - par.axis_index("tp") * weight.shape[0]',
        "    local = ids",
        LAYERS,
    ),
    Mutant(
        "embedding: the first id of each shard is taken for another rank's",
        "nn/embedding.py",
        "    mine = (local >= 0) & (local < weight.shape[0])",
        "    mine = (local > 0) & (local < weight.shape[0])",
        LAYERS,
    ),
    Mutant(
        "cross-entropy: the padding of an uneven vocabulary is not masked",
        "nn/cross_entropy.py",
        "return min(max(self.vocab - self.group.index * columns, 0), columns)",
        "return columns",
        LAYERS,
    ),
    Mutant(
        "cross-entropy: the maximum is not shared by the ranks",
        "nn/cross_entropy.py",
        'top = split.group.start(AllReduce("max"), peak).wait()',
        "top = peak",
        LAYERS,
    ),
    Mutant(
        "cross-entropy: ignored labels have a gradient",
        "nn/cross_entropy.py",
        "scale = factor.div_(total).masked_fill_(labels == split.ignore_index, 0.0)",
        "scale = factor.div_(total)",
        LAYERS,
    ),
    Mutant(
        "positions start at zero in every window of the sequence",
        "nn/stream.py",
        'tuple(length * i for i in range(par.size("tp")))',
        '(0,) * par.size("tp")',
        LAYERS,
    ),
    Mutant(
        "grouped heads: every rank reads the first key/value head",
        "nn/attention.py",
        "tuple(r * local // group for r in ranks)",
        "tuple(0 for r in ranks)",
        LAYERS,
    ),
    Mutant(
        "rms_norm: the gradient of the weight forgets the scale",
        "nn/norm.py",
        "grad_weight = scale @ product",
        "grad_weight = product.sum(0)",
        LAYERS,
    ),
    Mutant(
        "rotary: the pullback turns forward",
        "nn/rotary.py",
        "return turn(cotangent, cos, -sin), None, None",
        "return turn(cotangent, cos, sin), None, None",
        LAYERS,
    ),
    Mutant(
        "dropout: the same mask in every window of the sequence",
        "nn/dropout.py",
        'places[seq_dim] = places[seq_dim] + par.axis_index("tp") * shape[seq_dim]',
        "pass",
        ("tests/nn/test_dropout.py", "tests/test_dropout_layouts.py"),
    ),
    # The trace: debts and refusals
    Mutant(
        "trace: a leaf that meets split data owes nothing (norms in REDUCE_SCATTER)",
        "trace/follow.py",
        "return frozenset(Source(s.path, s.owed | missing) for s in v.sources)",
        "return v.sources",
        TRACE,
    ),
    Mutant(
        "trace: a missing pvary is accepted",
        "trace/follow.py",
        "if missing and (not v.sources or missing & v.closed):",
        "if False:",
        TRACE,
    ),
    Mutant(
        "trace: a sum of what is the same on every rank is accepted",
        "trace/rules.py",
        "if same := order(self.active - value.axes):",
        "if same := order(frozenset()):",
        TRACE,
    ),
    Mutant(
        "trace: a loss that differs along tp is accepted",
        "trace/outputs.py",
        "if extra := order(value.axes - data):",
        "if extra := order(value.axes - value.axes):",
        TRACE,
    ),
    Mutant(
        "trace: uses of a leaf that owe different sums are not compared",
        "trace/infer.py",
        "        if use.source.owed != most.source.owed:",
        "        if False:",
        TRACE,
    ),
    # Captured weights
    Mutant(
        "a captured weight gets the transpose of its gradient",
        "capture.py",
        "buffer = buffer.view(self.cotangent.shape[1], self.x.shape[1])",
        "buffer = buffer.view(self.x.shape[1], self.cotangent.shape[1]).t()",
        DEFERRED,
    ),
    Mutant(
        "the first product of a step is added to what the memory holds",
        "capture.py",
        "beta=0 if first else 1)",
        "beta=1)",
        DEFERRED,
    ),
    Mutant(
        "the first rows of a step are added to what the memory holds",
        "capture.py",
        "        if first:\n            buffer.zero_()",
        "        if False:\n            buffer.zero_()",
        DEFERRED,
    ),
    Mutant(
        "later sums of a bias replace earlier ones",
        "capture.py",
        "flat.add_(self.cotangent.sum(0, dtype=flat.dtype))",
        "flat.copy_(self.cotangent.sum(0, dtype=flat.dtype))",
        DEFERRED,
    ),
    Mutant(
        "weights are captured inside the transforms of a layer",
        "capture.py",
        "if not torch.is_grad_enabled() or _depth() != self._depth:",
        "if not torch.is_grad_enabled():",
        DEFERRED,
    ),
    Mutant(
        "the bias of a captured weight is forgotten",
        "nn/captured.py",
        "        if b is not None and b.path is not None:",
        "        if False:",
        DEFERRED,
    ),
    Mutant(
        "a weight whose input needs no cotangent gets no gradient",
        "nn/captured.py",
        "None if x.requires_grad else capture.token, kept",
        "None, kept",
        DEFERRED,
    ),
    Mutant(
        "a leaf that is captured and used otherwise keeps the captured part alone, in the first step",
        "pipeline/back.py",
        "for path in self.capture.raw if path in ordinary}",
        "for path in self.capture.raw if path in ordinary and not self.capture.uses[path]}",
        DEFERRED,
    ),
    Mutant(
        "a leaf that is captured and used otherwise keeps the captured part alone, later on",
        "pipeline/back.py",
        "            if path not in capture.ordinary\n",
        "",
        DEFERRED,
    ),
    Mutant(
        "the parts of a gradient are added in another order where weights come later",
        "pipeline/back.py",
        "if path in self.shared or self.capture.uses[path]]",
        "if self.capture.uses[path]]",
        DEFERRED,
    ),
    # Reduction, ties, norm
    Mutant(
        "gradients averaged over the ranks instead of summed",
        "reduce.py",
        "                self.flat[i] = next(summed)",
        "                self.flat[i] = next(summed) / len(bucket.ranks)",
        STEPS,
    ),
    Mutant(
        "a leaf tied over stages is not summed over its owners",
        "plan.py",
        '                owed["pp"] = _tie_debt(self.readers[path])',
        "                pass",
        STEPS,
    ),
    Mutant(
        "a tied leaf is counted once a stage in the norm",
        "spec.py",
        "return coords.pp == self.owners[0] and all(",
        "return all(",
        STEPS,
    ),
    Mutant(
        "a leaf that is whole on every tp rank is counted tp times in the norm",
        "spec.py",
        'if axis != "pp" and axis not in self.axes)',
        'if axis not in ("pp", "tp") and axis not in self.axes)',
        STEPS,
    ),
    Mutant(
        "the gradients of later microbatches replace those of earlier ones",
        "reduce.py",
        "                buffer.add_(grad)",
        "                buffer.copy_(grad)",
        STEPS,
    ),
    Mutant(
        "gradients of the step before are kept in reused buffers",
        "reduce.py",
        "        self._unwritten = set(self.leaves)\n",
        '        self._unwritten = set() if hasattr(self, "_unwritten") else set(self.leaves)\n',
        STEPS,
    ),
    Mutant(
        "gradients in the padding of an uneven shard are kept",
        "shards.py",
        "            part.narrow(dim, kept, beyond).zero_()",
        "            pass",
        (*STEPS, "tests/test_reduce.py"),
    ),
    Mutant(
        "the clip scales small gradients up",
        "metrics.py",
        "min(1.0, clip / (norm + 1e-6))",
        "clip / (norm + 1e-6)",
        (*STEPS, "tests/test_metrics.py"),
    ),
    Mutant(
        "each replica averages over its own terms",
        "step.py",
        "return int(group.start(AllReduce(), total, donate=True).wait())",
        "return int(total) * self.plan.replicas",
        STEPS,
    ),
    Mutant(
        "microbatches are averaged with equal weight",
        "step.py",
        "sum(self.plan.model.count_terms(share.microbatch(i)) for i in range(self.plan.microbatches))",
        "self.plan.model.count_terms(share.microbatch(0)) * self.plan.microbatches",
        STEPS,
    ),
    # Pipeline
    Mutant(
        "1F1B warms up one microbatch too few",
        "pipeline/makers.py",
        "away if chunks == 1 else 2 * away",
        "max(0, away - 1) if chunks == 1 else 2 * away",
        SCHEDULES,
    ),
    Mutant(
        "backwards of AFAB in the order of a stack",
        "pipeline/makers.py",
        'return Schedule("afab", looped_bfs(ranks, microbatches, 1).rows)',
        'return Schedule("afab", tuple(r[:len(r) // 2] + r[:len(r) // 2 - 1:-1] for r in '
        "looped_bfs(ranks, microbatches, 1).rows))",
        SCHEDULES,
    ),
    # Schedules: makers, proof, clock
    Mutant(
        "a deferred weight gradient counts as no activation",
        "pipeline/live.py",
        'last = "BW" if any',
        'last = "BI" if any',
        SCHEDULES,
    ),
    Mutant(
        "one activation more than the bound passes",
        "pipeline/live.py",
        "if now > bound:",
        "if now > bound + 1:",
        SCHEDULES,
    ),
    Mutant(
        "a schedule whose weight-backward is missing passes",
        "pipeline/wellformed.py",
        "if there in ([whole], [inputs, weights]):",
        "if there in ([whole], [inputs], [inputs, weights]):",
        SCHEDULES,
    ),
    Mutant(
        "a weight-backward before its input-backward passes",
        "pipeline/wellformed.py",
        '"W": "I"})',
        '"W": "F"})',
        SCHEDULES,
    ),
    Mutant(
        "the verifier takes what was sent as received in any order of the rows",
        "pipeline/token_game.py",
        "return next((message for message in takes if message not in self.there), None)",
        "return next((message for message in takes if message not in self.there and message.local), None)",
        SCHEDULES,
    ),
    Mutant(
        "the order of messages at the two ends of a lane is not compared",
        "pipeline/token_game.py",
        "if sent != posted:",
        "if False:",
        SCHEDULES,
    ),
    Mutant(
        "messages within a rank take time",
        "pipeline/simulate.py",
        "(0 if message.local else costs.transfer)",
        "costs.transfer",
        ("tests/pipeline/test_simulate.py",),
    ),
    Mutant(
        "messages take no time",
        "pipeline/simulate.py",
        "(0 if message.local else costs.transfer)",
        "0",
        ("tests/pipeline/test_simulate.py",),
    ),
    Mutant(
        "greedy: no place is kept for the stages after",
        "pipeline/greedy.py",
        "self.live + sum(later > stage for later in self.stages) < self.most_live",
        "self.live < self.most_live",
        SCHEDULES,
    ),
    Mutant(
        "greedy: a forward without room waits for idle time",
        "pipeline/greedy.py",
        "room = weight if ready else None",
        "room = None",
        SCHEDULES,
    ),
    Mutant(
        "greedy: input-backwards always go first",
        "pipeline/greedy.py",
        'if rank.turn == "F" else',
        "if False else",
        SCHEDULES,
    ),
    Mutant(
        "ZB-H1 puts off one weight-backward too few",
        "pipeline/makers.py",
        '*[("W", stage)] * (at >= rank)',
        '*[("W", stage)] * (at >= max(0, rank - 1))',
        SCHEDULES,
    ),
    Mutant(
        "an overlapped pair of a schedule file is read in the wrong order",
        "pipeline/schedule_file.py",
        'several[1].split(";")',
        'several[1].split(";")[::-1]',
        ("tests/pipeline/test_schedule_file.py",),
    ),
    # Running them
    Mutant(
        "the pullbacks of the wrong microbatch",
        "pipeline/execute.py",
        "self.part.chunks[stage], self.live[stage, microbatch]",
        "self.part.chunks[stage], self.live[max(key for key in self.live if key[0] == stage)]",
        PIPELINE,
    ),
    Mutant(
        "a received buffer is sent on, and used again before it has arrived",
        "pipeline/buffers.py",
        "return x.clone() if x.untyped_storage()._cdata in self._memory else x",
        "return x",
        ("tests/pipeline/test_buffers.py",),
    ),
    Mutant(
        "the count of a loss stays in received memory, which the next microbatch overwrites",
        "pipeline/execute.py",
        "self.buffers.owned(x[0]), self.buffers.owned(x[1])",
        "x[0], x[1]",
        PIPELINE,
    ),
    Mutant(
        "a loss that is a leaf of its input does not get it from its stage",
        "pipeline/routes.py",
        "return [], read | {at for at in places if at is not None}",
        "return [], read",
        PIPELINE,
    ),
    Mutant(
        "received memory is given back after the input-backward, though weight gradients still read it",
        "pipeline/execute.py",
        "        if whole:\n            self._finish(",
        "        if not whole:\n            self._finish(live)\n        else:\n            self._finish(",
        PIPELINE,
    ),
    Mutant(
        "the cotangents of a value that two stages read are not added up",
        "pipeline/execute.py",
        "found[place] = found[place] + ct if place in found else ct",
        "found[place] = ct",
        PIPELINE,
    ),
    Mutant(
        "a leaf that a stage reads and hands on loses the cotangent of its reader",
        "pipeline/routes.py",
        "if at is None or (at in read and _carries(entries[-1], place)) else",
        "if at is None else",
        PIPELINE,
    ),
    Mutant(
        "a receive goes by the order of the receiver, not by that of the sends",
        "pipeline/messages.py",
        "posts += arriving[lane][posted[lane] : places[message] + 1]",
        "posts += [message] if places[message] >= posted[lane] else []",
        PIPELINE,
    ),
    Mutant(
        "the last layer is left out of an uneven split",
        "plan.py",
        "return tuple(layer for layer in self.model.all_layers if self.stage_of[layer.name] == stage)",
        "return tuple(layer for layer in self.model.all_layers[:-1] if self.stage_of[layer.name] == stage)",
        ("tests/test_plan.py", "tests/pipeline", *STEPS),
    ),
    Mutant(
        "every replica reads the first rows of the batch",
        "batch.py",
        "start, stop = index * share, (index + 1) * share",
        "start, stop = 0, share",
        STEPS,
    ),
    # State
    Mutant(
        "a shard begins where an even one would",
        "spec.py",
        "return tuple(getattr(coords, axis) * size if axis else 0 for size",
        "return tuple(getattr(coords, axis) * (size - size % 2) if axis else 0 for size",
        SHARDS,
    ),
    Mutant(
        "a leaf is drawn from the rank's own place instead of the global one",
        "init.py",
        "(local - above * length + start) * stride",
        "(local - above * length) * stride",
        ("tests/test_init.py", *STEPS),
    ),
    Mutant(
        "the optimizer starts afresh after a change of layout",
        "restore.py",
        "    if opt is None:",
        "    if True:",
        ("tests/testing/test_stateful.py", "tests/test_restore.py"),
    ),
    Mutant(
        "the step number is lost after a change of layout",
        "restore.py",
        "    return State(step, seed, leaves, slots)",
        "    return State(0, seed, leaves, slots)",
        ("tests/testing/test_stateful.py", "tests/test_restore.py"),
    ),
    Mutant(
        "a whole leaf is the sum of its replicas",
        "shards.py",
        "    whole = torch.zeros(spec.shape, dtype=dtype, device=world.device)\n    if part is not None and spec.counted_by(",
        "    whole = torch.zeros(spec.shape, dtype=dtype, device=world.device)\n    if part is not None or spec.counted_by(",
        SHARDS,
    ),
    Mutant(
        "AdamW corrects its bias with the number of the step before",
        "optim/adamw.py",
        "count=step + 1",
        "count=max(step, 1)",
        ("tests/optim", *STEPS),
    ),
    # Users' own maps
    Mutant(
        "maps: what a map has summed is summed again",
        "spec.py",
        "tuple(debt.axis for debt in self.owes if not debt.payer)",
        "tuple(debt.axis for debt in self.owes)",
        MAPS,
    ),
    Mutant(
        "maps: a clip of a partial sum is accepted",
        "maps/types.py",
        "    if owed := frozenset().union(*(kind.partial for kind in kinds)):",
        "    if owed := frozenset():",
        MAPS,
    ),
    Mutant(
        "maps: a sum over a cut dim is taken for the whole sum",
        "maps/rules.py",
        '        elif name == "sum":\n            partial.add(axis)',
        '        elif name == "sum":\n            pass',
        MAPS,
    ),
    # Pictures and files of schedules
    Mutant(
        "pictures: time starts when the clock does, not when the run does",
        "report/gantt.py",
        "(time - start) * scale",
        "time * scale",
        PICTURES,
    ),
    Mutant(
        "traces: milliseconds for microseconds",
        "report/chrome_trace.py",
        "_MICRO = 1e6",
        "_MICRO = 1e3",
        PICTURES,
    ),
    Mutant(
        "traces: the step after the one that is asked for",
        "report/step_trace.py",
        "or step != logging.trace_step",
        "or step != logging.trace_step + 1",
        PICTURES,
    ),
    Mutant(
        "traces: copies of a rank need not have done the same",
        "report/replay.py",
        "if rows[first] != row:",
        "if sorted(rows[first]) != sorted(row):",
        PICTURES,
    ),
    Mutant(
        "split: the loss costs nothing",
        "transforms/stage_pp.py",
        "(costs.get(LOSS, 0) if n == names[-1] else 0)",
        "(costs.get(LOSS, 0) if n == names[0] else 0)",
        ("tests/transforms/test_stage_pp.py",),
    ),
    Mutant(
        "split: each stage is looked at as if its rank had no other",
        "pipeline/split.py",
        "load, need = held[0] + problem.load",
        "load, need = problem.load",
        ("tests/pipeline/test_split.py",),
    ),
    Mutant(
        "split: a rank has room for each of its stages, but not for all of them",
        "pipeline/split.py",
        "held[1] + problem.need(",
        "problem.need(",
        ("tests/pipeline/test_split.py",),
    ),
    Mutant(
        "split: what the loss keeps for backward needs no memory",
        "pipeline/fit.py",
        "kept[-1] += traced[LOSS].saved",
        "kept[-1] += 0 * traced[LOSS].saved",
        ("tests/transforms/test_stage_pp.py",),
    ),
    Mutant(
        "memory: a bound is counted for one row, whatever was measured",
        "transforms/stage_pp.py",
        "replace(memory, batch=measured.batch)",
        "replace(memory, batch={name: (1, *shape[1:]) for name, shape in measured.batch.items()})",
        ("tests/transforms/test_stage_pp.py",),
    ),
    Mutant(
        "memory: rows that the model leaves open are one",
        "pipeline/told.py",
        "if not any(None in given.shape for given in known.values()):",
        "if not any(None in given.shape[1:] for given in known.values()):",
        ("tests/transforms/test_stage_pp.py",),
    ),
    Mutant(
        "explain: activations are those of made-up sizes",
        "report/stages.py",
        "if plan.told else plan.example()",
        "if plan.told and False else plan.example()",
        ("tests/report/test_stages.py",),
    ),
    Mutant(
        "memory: a leaf that two layers of a stage read is held twice",
        "pipeline/fit.py",
        "if any(start <= at < end for at in leaf.readers)",
        "for at in leaf.readers if start <= at < end",
        ("tests/transforms/test_stage_pp.py",),
    ),
    Mutant(
        "saved bytes: a storage counts as often as it is saved",
        "trace/saved.py",
        "known.add(storage)",
        "known.add(0)",
        ("tests/trace/test_saved.py",),
    ),
    Mutant(
        "saved bytes: the parameters are counted",
        "trace/infer.py",
        "apart = inputs if first else inputs[: len(layer.paths)]",
        "apart = inputs if first else inputs[:0]",
        ("tests/trace/test_saved.py",),
    ),
    Mutant(
        "a step does not ask whether its plan is whole",
        "step.py",
        "check_whole(plan)",
        "check_whole",
        ("tests/pipeline/test_whole.py",),
    ),
    Mutant(
        "configuration: the stages of a rank do not reach the plan",
        "config/build.py",
        "chunks=p.pp_chunks",
        "chunks=None",
        ("tests/config",),
    ),
)
