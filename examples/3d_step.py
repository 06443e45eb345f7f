"""Train a language model on real text over data, tensor and pipeline parallel ranks.

torchrun --nproc-per-node 8 examples/3d_step.py --config-file specs/tiny.yaml   # eight processes
python examples/3d_step.py --config-file specs/tiny.yaml                        # eight threads of this one
"""

import sys

import functional_par as fp
from functional_par.config import flags
from functional_par.report import exit_code, prepare, progress, say, traced


def train(world, config, program, corpus):
    """What every rank does; all return the same metrics, one record a step."""
    how = {"clip": config.clip, "dtype": config.dtype, "engine": config.engine, "donate": True}
    step = program.step(world, config.optimizer(), **how)
    state = step.init(config.seed)
    batches = fp.data.batches(
        corpus, batch_size=config.global_batch_size, seq_len=config.seq_len, seed=config.data_seed, steps=config.steps
    )
    with progress(world, config) as log:
        for number, batch in enumerate(batches, 1):
            with traced(world, config, number) as recording:  # None, but in the step that --trace-file writes
                state, metrics = step(state, batch, recording)
            log(metrics)
    return log.history


def main(argv=None):
    """Read the configuration, check everything, then train; returns the metrics of every step."""
    options = flags.parse(argv, __doc__)
    config, mesh = options.config, options.config.mesh()
    if options.print_groups:
        say(mesh.table())
        return []
    program, corpus = config.program(), config.corpus()
    prepare(options, mesh, program, corpus)  # whatever can be known without running is checked before a rank exists
    run = {"backend": options.backend, "keep_memory": config.sections.general.keep_memory}
    return fp.run(lambda world: train(world, config, program, corpus), mesh, **run)[0]


if __name__ == "__main__":
    sys.exit(exit_code(main))
