"""Ranks as threads: what each operation yields, and how a run ends that cannot go on."""

import re
import threading
import time

import pytest
import torch

from functional_par.comm import local
from functional_par.comm.base import AllGather, AllReduce, AllToAll, Permute, ReduceScatter
from functional_par.comm.solo import SoloGroup
from functional_par.errors import CommError, DeadlockError, MismatchError, RankFailedError
from functional_par.mesh import Mesh
from functional_par.run import run
from tests.raises import matched

every_size = pytest.mark.parametrize("size", [2, 3, 4])


def value(rank, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64)


def results(op, size, *shape, donate=False):
    """What every rank gets from ``op`` on ``value(rank, *shape)``."""

    def main(world):
        return world.group("tp").start(op, value(world.rank, *shape), donate=donate).wait()

    return run(main, Mesh(tp=size))


def summed(xs):
    return sum(xs[1:], xs[0])


@every_size
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (0,), (), (3, local.CHUNK - 1)])
def test_all_reduce_is_the_sum_in_rank_order_on_every_rank(size, donate, shape):
    expected = summed([value(rank, *shape) for rank in range(size)])
    for result in results(AllReduce(), size, *shape, donate=donate):
        assert torch.equal(result, expected)


@every_size
@pytest.mark.parametrize("shape", [(3, 5), (local.CHUNK + 1,)])
def test_all_reduce_can_take_the_maximum(size, shape):
    expected = torch.stack([value(rank, *shape) for rank in range(size)]).amax(0)
    for result in results(AllReduce("max"), size, *shape):
        assert torch.equal(result, expected)


@every_size
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_concatenates_in_rank_order(size, dim):
    expected = torch.cat([value(rank, 2, 3) for rank in range(size)], dim)
    for result in results(AllGather(dim), size, 2, 3):
        assert torch.equal(result, expected)


@every_size
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_is_a_chunk_of_the_sum(size, dim):
    expected = summed([value(rank, 2 * size, 3 * size) for rank in range(size)]).chunk(size, dim)
    for result, chunk in zip(results(ReduceScatter(dim), size, 2 * size, 3 * size), expected, strict=True):
        assert torch.equal(result, chunk)


@every_size
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_all_to_all_exchanges_chunks(size, split, concat):
    inputs = [value(rank, 2 * size, 3 * size) for rank in range(size)]
    for rank, result in enumerate(results(AllToAll(split, concat), size, 2 * size, 3 * size)):
        assert torch.equal(result, torch.cat([x.chunk(size, split)[rank] for x in inputs], concat))


@every_size
def test_permute_moves_values_to_their_destination(size):
    to = tuple((rank + 1) % size for rank in range(size))
    for rank, result in enumerate(results(Permute(to), size, 4)):
        assert torch.equal(result, value(to.index(rank), 4))


def test_one_rank_gets_its_own_value_and_counts_no_call():
    def main(world):
        x = value(0, 3)
        group = world.group("tp")
        assert isinstance(group, SoloGroup)
        assert group.start(AllReduce(), x).wait() is x
        return world.record.calls

    assert run(main, Mesh()) == [{}]


@pytest.mark.parametrize("op", [AllReduce(), AllGather(0), AllToAll(0, 0), Permute((1, 0)), ReduceScatter(0)])
@pytest.mark.parametrize("length", [4, 2 * local.CHUNK])
def test_results_alias_no_rank_and_inputs_stay_as_they_were(op, length):
    def main(world):
        x = value(world.rank, length)
        result = world.group("tp").start(op, x).wait()
        assert torch.equal(x, value(world.rank, length))
        return x, result

    tensors = [tensor for pair in run(main, Mesh(tp=2)) for tensor in pair]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4


def test_a_large_donated_input_is_the_result():
    def main(world):
        x = value(world.rank, local.CHUNK + 5)
        return world.group("tp").start(AllReduce(), x, donate=True).wait().data_ptr() == x.data_ptr()

    assert all(run(main, Mesh(tp=2)))


def test_inputs_need_not_be_contiguous():
    def main(world):
        x = value(world.rank, 700, 400).T
        return world.group("tp").start(AllReduce(), x).wait(), world.group("tp").start(ReduceScatter(1), x).wait()

    expected = value(0, 700, 400).T + value(1, 700, 400).T
    for rank, (whole, part) in enumerate(run(main, Mesh(tp=2))):
        assert torch.equal(whole, expected)
        assert torch.equal(part, expected.chunk(2, 1)[rank])


@pytest.mark.parametrize("length", [4, 3 * local.CHUNK])
def test_waits_may_come_in_any_order_and_more_than_once(length):
    def main(world):
        group = world.group("tp")
        handles = [group.start(AllReduce(), value(world.rank, length, seed=seed)) for seed in range(4)]
        order = [0, 1, 2, 3] if world.rank == 0 else [3, 1, 0, 2]
        found = {seed: handles[seed].wait() for seed in order}
        assert all(handles[seed].wait() is found[seed] for seed in order)
        return [found[seed] for seed in range(4)]

    for found in run(main, Mesh(tp=3)):
        for seed, result in enumerate(found):
            assert torch.equal(result, summed([value(rank, length, seed=seed) for rank in range(3)]))


def test_a_result_that_nobody_waits_for_holds_nobody_up():
    def main(world):
        world.group("tp").start(AllReduce(), value(world.rank, 2 * local.CHUNK))
        return world.group("tp").start(AllReduce(), torch.ones(1)).wait().item()

    assert run(main, Mesh(tp=2)) == [2.0, 2.0]


def test_tensors_that_require_grad_are_exchanged_as_values():
    def main(world):
        return world.group("tp").start(AllReduce(), torch.ones(2, requires_grad=True)).wait()

    assert not any(result.requires_grad for result in run(main, Mesh(tp=2)))


def test_groups_follow_the_mesh():
    def main(world):
        one = torch.tensor([world.rank])
        merged = world.group("dp", "tp").start(AllGather(0), one)
        return [
            world.group(axis).start(AllGather(0), one).wait().tolist() for axis in ("pp", "dp", "tp")
        ], merged.wait()

    def main_prepared(world):
        world.prepare(world.mesh.groups("dp", "tp"))
        return main(world)

    mesh = Mesh(pp=2, dp=2, tp=2)
    for rank, (single, merged) in enumerate(run(main_prepared, mesh)):
        assert single == [list(mesh.group(axis, rank=rank)) for axis in ("pp", "dp", "tp")]
        assert merged.tolist() == list(mesh.group("dp", "tp", rank=rank))
    with pytest.raises(CommError, match=r"group 'dp\+tp' of ranks 0, 1, 2, 3 was not prepared: call world.prepare"):
        run(main, mesh)


def test_one_set_under_two_labels_is_one_group():
    def main(world):
        a, b = world.subgroup((0, 1), "tie embed"), world.group("tp")
        handles = [a.start(AllReduce(), torch.tensor(1)), b.start(AllReduce(), torch.tensor(10))]
        return [handle.wait().item() for handle in handles], sorted(label for _, label, _ in world.record.calls)

    assert run(main, Mesh(tp=2)) == [([2, 20], ["tie embed", "tp"])] * 2


def test_sets_are_checked_before_they_are_used():
    def prepares_other_sets(world):
        world.prepare([(0, 1)] if world.rank == 0 else [(1, 2)])

    with pytest.raises(MismatchError, match="every rank prepares the same sets in the same order"):
        run(prepares_other_sets, Mesh(tp=3))
    with pytest.raises(CommError, match=r"rank \d asks for group 'x' of ranks? .* to which it does not belong"):
        run(lambda world: world.subgroup(((world.rank + 1) % 3,), "x"), Mesh(tp=3))
    with pytest.raises(CommError, match=r"group \(1, 0\): it holds ranks 0 to 2 in increasing order"):
        run(lambda world: world.prepare([(1, 0)]), Mesh(tp=3))


def test_messages_arrive_in_order_and_are_copies():
    def main(world):
        other, sent = 1 - world.rank, [value(world.rank, 3, seed=seed) for seed in range(3)]
        for x in sent:
            assert world.send(x, other).wait() is x
        handles = [world.recv((3,), torch.float64, other, label="act") for _ in range(3)]
        received = [handle.wait() for handle in reversed(handles)][::-1]
        assert world.record.calls == {("", "pp", "send"): 3, ("", "act", "recv"): 3}
        assert world.record.nbytes == {("", "pp", "send"): 72, ("", "act", "recv"): 72}
        return sent, received

    (sent0, received0), (sent1, received1) = run(main, Mesh(pp=2))
    for sent, received in [*zip(sent0, received1, strict=True), *zip(sent1, received0, strict=True)]:
        assert torch.equal(sent, received)
        assert sent.data_ptr() != received.data_ptr()


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_of_another_shape_names_both(late):
    def main(world):
        if world.rank == late:
            time.sleep(0.1)
        if world.rank == 0:
            world.send(torch.zeros(2), 1)
        else:
            world.recv((3,), torch.float64, 0).wait()

    with pytest.raises(MismatchError, match=r"rank 0 sent float32\[2\] to rank 1, which expects float64\[3\]"):
        run(main, Mesh(pp=2))


def test_only_other_ranks_are_peers():
    with pytest.raises(CommError, match=r"send to rank 2, but its peers are the other ranks of Mesh\(pp=2\)"):
        run(lambda world: world.send(torch.zeros(1), 2), Mesh(pp=2))
    with pytest.raises(CommError, match="recv from rank"):
        run(lambda world: world.recv((1,), torch.float32, world.rank), Mesh(pp=2))


@pytest.mark.parametrize(
    ("op", "x"),
    [(AllGather(0), torch.zeros(4)), (AllReduce(), torch.zeros(5)), (AllReduce(), torch.zeros(4).double())],
)
def test_different_collectives_at_one_place_name_both_ranks_and_calls(op, x):
    def main(world):
        group = world.group("tp")
        group.start(*((op, x) if world.rank == 1 else (AllReduce(), torch.zeros(4)))).wait()

    with pytest.raises(MismatchError, match=r"rank \d entered all_") as caught:
        run(main, Mesh(tp=2))
    matched(caught.value, "all_reduce over tp of float32[4]")
    assert {"rank 0", "rank 1"} <= set(re.findall(r"rank \d", str(caught.value)))
    matched(caught.value, "same collectives on the same shapes")


def test_a_rank_that_raises_stops_the_others_at_once():
    seen = {}

    def main(world):
        try:
            if world.rank == 1:
                raise KeyError("embed")
            world.group("tp").start(AllReduce(), torch.ones(2)).wait()
        except Exception as error:
            seen[world.rank] = error
            raise

    started = time.monotonic()
    with pytest.raises(KeyError, match="embed") as caught:
        run(main, Mesh(tp=3))
    assert time.monotonic() - started < 5
    assert caught.value is seen[1]
    assert caught.traceback[-1].name == "main"
    for rank in (0, 2):
        assert isinstance(seen[rank], RankFailedError)
        matched(seen[rank], f"rank {rank} stopped because rank 1 failed: KeyError: 'embed'")


def test_a_rank_that_waits_for_one_that_has_finished_is_told_at_once():
    def main(world):
        if world.rank == 0:
            world.group("tp").start(AllReduce(), torch.ones(2)).wait()

    with pytest.raises(DeadlockError) as caught:
        run(main, Mesh(tp=2))
    matched(
        caught.value,
        "ranks wait for each other and cannot go on.\n"
        "  rank 0: waits for rank 1 in all_reduce over tp of float32[2]; last call: all_reduce over tp of float32[2]\n"
        "  rank 1: has finished; last call: nothing yet",
    )
    assert caught.traceback[-1].name != "_deadlock"


def test_ranks_that_wait_for_each_other_are_told_at_once():
    seen = {}

    def main(world):
        try:
            if world.rank == 0:
                world.recv((2,), torch.float32, 1).wait()
            world.group("tp").start(AllReduce(), torch.ones(2)).wait()
        except DeadlockError as error:
            seen[world.rank] = error
            raise

    started = time.monotonic()
    with pytest.raises(DeadlockError, match="rank 0: waits for rank 1 in recv over pp of float32"):
        run(main, Mesh(tp=2))
    assert time.monotonic() - started < 5
    assert len(seen) == 2
    assert str(seen[0]) == str(seen[1])
    for error in seen.values():
        matched(error, "rank 1: waits for rank 0 in all_reduce")


def test_the_timeout_is_the_last_resort():
    release = threading.Event()

    def main(world):
        if world.rank == 0:
            release.wait(10)
        try:
            world.group("tp").start(AllReduce(), torch.ones(2)).wait()
        finally:
            release.set()

    with pytest.raises(DeadlockError, match=r"(?s)after 0.2 s without progress.*rank 0: is computing"):
        run(main, Mesh(tp=2), timeout=0.2)


def test_the_record_counts_calls_and_bytes_by_phase():
    def main(world):
        group = world.group("dp")
        with world.record.during("grads"):
            group.start(AllReduce(), torch.ones(4))
            group.start(ReduceScatter(0), torch.ones(4)).wait()
        assert world.record.last == "reduce_scatter over dp of float32[4]"
        group.start(AllToAll(0, 0), torch.ones(2)).wait()
        return dict(world.record.nbytes)

    expected = {
        ("grads", "dp", "all_reduce"): 16,
        ("grads", "dp", "reduce_scatter"): 16,
        ("", "dp", "all_to_all"): 8,
    }
    assert run(main, Mesh(dp=2)) == [expected] * 2
