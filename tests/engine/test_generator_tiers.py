"""States and latents that left the device: parked, evicted, stored on disk, read by another process, damaged, slow."""

import copy
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from solo import DEMO, Recorder, assert_equals_solo
from valkey_server import Server

from kimi_k3 import KimiK3ForCausalLM, KimiK3Generator, SamplingParams
from kimi_k3.engine import prefix_index, tier_store
from kimi_k3.engine.agreement import Agreement
from kimi_k3.engine.device_pools import DevicePools, PoolLayout
from kimi_k3.engine.tier_store import _key_in, _slice_name
from kimi_k3.engine.tiers import DiskTier, HostTier, RemoteTier
from kimi_k3.quantization import quantize_expert_activations_int8_

SMALL = {"max_num_seqs": 4, "num_blocks": 12, "max_tokens_per_step": 128, "batch_invariant": True}


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(length)]


def ask(gen, model, prompt, new=3):
    """One request; its logits must be those of the sequence alone. Returns the prompt tokens that ran."""
    recorder, before = Recorder(), gen.counts["prefill_tokens"]
    params = SamplingParams(max_new_tokens=new, logits_processor=recorder)
    (result,) = gen.generate([prompt], params)
    assert_equals_solo(model, prompt, result, recorder.rows, params)
    return gen.counts["prefill_tokens"] - before


def test_what_was_evicted_comes_back_from_the_host(demo):
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL) as gen:
        for seed in range(6):
            assert ask(gen, demo, prompt_of(300, seed)) == 300
        assert gen.stats()["evictions"] > 0
        gen.tiers.stack.flush()
        evaluated = [ask(gen, demo, [*prompt_of(300, seed), 5]) for seed in range(6)]
        assert max(evaluated) <= 1 + 63 and sum(gen.tiers.counts[k] for k in ("restored_tokens",)) >= 4 * 256


def test_a_tier_on_disk_outlives_the_generator(demo, tmp_path):
    prompt = prompt_of(200, 1)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        assert ask(gen, demo, prompt) == 200
    with KimiK3Generator(demo, tiers=(HostTier(1 << 26), DiskTier(tmp_path, 1 << 28)), **SMALL) as gen:
        assert ask(gen, demo, [*prompt, 9]) <= 1
        assert gen.stats()["tiers"]["by_tier"]["disk"]["hits"] > 0


def test_what_was_evicted_to_the_host_outlives_the_generator_on_disk(demo, tmp_path):
    tiers = HostTier(1 << 26), DiskTier(tmp_path, 1 << 28)
    with KimiK3Generator(demo, tiers=tiers, **SMALL) as gen:
        for seed in range(3):
            ask(gen, demo, prompt_of(200, seed))
        gen.index.clear()  # all of it to the host
        gen.tiers.stack.flush()
        assert gen.stats()["tiers"]["by_tier"]["disk"]["entries"] == 0
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        assert max(ask(gen, demo, [*prompt_of(200, seed), 9]) for seed in range(3)) <= 1


def test_a_remote_server_that_hangs_is_a_counted_miss_and_stalls_no_step(demo):
    server = Server()
    try:
        prompts = [prompt_of(200, seed) for seed in range(3)]
        with KimiK3Generator(demo, tiers=(RemoteTier(server.url),), **SMALL) as gen:
            for prompt in prompts:
                ask(gen, demo, prompt)
        with KimiK3Generator(demo, tiers=(RemoteTier(server.url, timeout_s=5.0),), **SMALL) as gen:
            assert ask(gen, demo, [*prompts[0], 5]) <= 1
            (remote,) = gen.tiers.stack.tiers
            server.process.send_signal(signal.SIGSTOP)
            busy = gen.add(prompt_of(30, 99), SamplingParams(max_new_tokens=500, ignore_eos=True))
            late = gen.add([*prompts[1], 5], SamplingParams(max_new_tokens=3, ignore_eos=True))
            slowest, ended = 0.0, set()
            while late not in ended:
                start = time.perf_counter()
                ended |= {output.rid for output in gen.step() if output.finish_reason}
                slowest = max(slowest, time.perf_counter() - start)
            assert slowest < 2.0  # of a socket's 5 seconds nothing; the prompt's own 200 tokens take less
            assert gen.tiers.counts["miss_timeout"] >= 1 and gen.result(late).reused_tokens == 0
            gen.abort(busy)
            server.process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            remote._down_until = 0.0
            assert ask(gen, demo, [*prompts[2], 5]) <= 1
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()


def test_lossy_tiers_take_fewer_bytes_of_what_the_engine_stores(demo):
    stored = []
    for options in ({}, {"latents": "fp8", "snapshots": "bf16"}):
        with KimiK3Generator(demo, tiers=(HostTier(1 << 28, **options),), **SMALL | {"batch_invariant": False}) as gen:
            gen.generate([prompt_of(200, 0)], SamplingParams(max_new_tokens=2))
            gen.index.clear()
            gen.tiers.stack.flush()
            stored.append(gen.stats()["tiers"]["by_tier"]["host"]["bytes"])
            (result,) = gen.generate([[*prompt_of(200, 0), 5]], SamplingParams(max_new_tokens=2))
            assert result.reused_tokens == 200
    assert stored[1] < 0.8 * stored[0]


def test_a_stored_state_that_is_not_finite_is_a_miss(demo):
    """Fault 6.2, of an entry that is whole and well packed."""
    tier, prompt = HostTier(1 << 28), prompt_of(200, 0)
    with KimiK3Generator(demo, tiers=(tier,), **SMALL) as gen:
        gen.generate([prompt], SamplingParams(max_new_tokens=2))
        gen.index.clear()
        gen.tiers.stack.flush()
        states = [key for key in tier.recent() if "-s" in key]
        for key in states:
            payload = {name: tensor.clone() for name, tensor in tier.read(key).items()}
            for tensor in payload.values():
                if tensor.is_floating_point():
                    tensor.view(-1)[-1] = float("nan")
            tier.delete(key)
            assert tier.put(key, payload)
        (result,) = gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=2))
        assert states and result.reused_tokens == 0 and gen.tiers.counts["miss_damaged"] >= 1
        gen.clear_prefix_cache()
        assert gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=2))[0].token_ids == result.token_ids


def test_what_went_on_from_rounded_states_never_serves_exact_tiers(demo, tmp_path):
    """Fault 7.2: above the exact folder lies a lossy host, and what follows a hit there is exact in nothing but its form."""
    prompt, options = prompt_of(200, 1), SMALL | {"batch_invariant": False}
    lossy = {"latents": "fp8", "snapshots": "fp8"}
    roots = []
    for host, reused in ((lossy, 0), ({}, 0), (lossy, 200), ({}, 200)):
        tiers = (HostTier(1 << 26, **host), DiskTier(tmp_path, 1 << 28))
        with KimiK3Generator(demo, tiers=tiers if reused else tiers[::-1], **options) as gen:
            roots.append(gen._root)
            (result,) = gen.generate([[*prompt, 5]], SamplingParams(max_new_tokens=2))
            assert result.reused_tokens == reused
            if not reused:
                gen.generate([prompt], SamplingParams(max_new_tokens=2))
    assert roots[:2] == roots[2:]
    with KimiK3Generator(demo, tiers=(HostTier(1 << 26),), **options) as gen:
        gen._weights = ""
        alone = gen._root_key(False)
    with KimiK3Generator(demo, **options) as gen:
        gen._weights = ""
        assert gen._root_key(False) == alone


def test_at_the_end_states_find_their_blocks_though_a_lossy_host_has_those(demo, tmp_path):
    def tiers():
        return HostTier(1 << 28, latents="fp8"), DiskTier(tmp_path, 1 << 28)

    prompts, params = [prompt_of(300, seed) for seed in range(2)], SamplingParams(max_new_tokens=1)
    options = SMALL | {"batch_invariant": False, "num_blocks": 60}
    with KimiK3Generator(demo, tiers=tiers(), **options) as gen:
        for prompt in prompts:
            gen.generate([prompt], params)
            gen.tiers.stack.flush()
            states = sorted(gen.index.entries(), key=lambda entry: entry.snapshot.position)
            gen.index.drop(states[0].snapshot)  # to the host, and the first block with it, which other states need
        (root,) = gen.index._roots
        kept = [gen.index.match(root, [*prompt, 7]).position for prompt in prompts]
        assert len(gen.tiers.known) and kept == [300, 300]
    with KimiK3Generator(demo, tiers=tiers(), **options) as gen:
        assert [gen.generate([[*prompt, 7]], params)[0].reused_tokens for prompt in prompts] == kept


@pytest.mark.parametrize("difference", ["weights", "dtype", "activations", "block_size", "mode", "image"])
def test_a_folder_that_describes_something_else_is_a_miss(demo, smooth, tmp_path, difference):
    """Fault 7.2: two runs over one folder that differ in one thing."""
    prompt = prompt_of(200, 1)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        ask(gen, demo, prompt)
    options, extra, model = dict(SMALL), b"", demo
    if difference == "activations":
        model = copy.deepcopy(demo)
        quantize_expert_activations_int8_(model)
    elif difference == "block_size":
        options["block_size"] = 32
    elif difference == "mode":
        options["batch_invariant"] = False
    elif difference == "image":
        extra = b"\1" * 32
    weight = demo.model.layers["1"].input_layernorm.weight
    before = weight.detach().clone()
    try:
        if difference == "weights":
            with torch.no_grad():
                weight.mul_(1.01)
        if difference == "dtype":
            model = KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16, progress=False)
        with KimiK3Generator(model, tiers=(DiskTier(tmp_path, 1 << 28),), **options) as gen:
            (result,) = gen.generate([prompt], SamplingParams(max_new_tokens=2), extra_key=extra)
            assert result.reused_tokens == 0 and gen.counts["prefill_tokens"] == 200
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_one_expert_of_another_revision_is_another_model(demo):
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.w1 = torch.nn.Parameter(torch.randn(896, 5, 7))
    digest = Agreement(demo).weights_digest
    before = digest(model)
    for expert in (0, 7, 415, 895):
        with torch.no_grad():
            kept = model.experts.w1[expert].clone()
            model.experts.w1[expert] *= 1.01
            assert digest(model) != before
            model.experts.w1[expert] = kept
    assert digest(model) == before


def test_an_offloaded_model_is_refused_tiers_that_outlive_it(tmp_path):
    model = KimiK3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, progress=False, device_map={"": "disk"})
    with pytest.raises(ValueError, match=r"offloaded model wants tiers that end with the process.*'disk'"):
        KimiK3Generator(model, tiers=(HostTier(1 << 26), DiskTier(tmp_path, 1 << 28)), **SMALL)


def test_after_the_weights_changed_the_cleared_cache_serves_nothing_old(smooth, tmp_path):
    model, prompt = copy.deepcopy(smooth), prompt_of(200, 1)
    old = copy.deepcopy(model.state_dict())
    new = {name: tensor * 1.01 if name.endswith("input_layernorm.weight") else tensor for name, tensor in old.items()}
    prompt = [token % model.config.text_config.vocab_size for token in prompt]
    with KimiK3Generator(model, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        ask(gen, model, prompt)
        gen.index.clear()  # all of it to the disk
        gen.tiers.stack.flush()
        ask(gen, model, [*prompt, 9])
        rid = gen.add(prompt)
        with pytest.raises(ValueError, match="want no unfinished requests, got 1"):
            gen.clear_prefix_cache()
        gen.abort(rid)
        model.load_state_dict(new)
        gen.clear_prefix_cache()
        assert gen.pool.num_slots == gen.pool.num_blocks == 0
        assert ask(gen, model, prompt) == 200
        model.load_state_dict(old)
        gen.clear_prefix_cache()
        assert ask(gen, model, [*prompt, 9]) <= 1  # from the disk


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_restore_that_gives_up_half_way_is_a_miss_and_leaks_nothing(demo, monkeypatch, error):
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL) as gen:
        prompt = prompt_of(200, 3)
        ask(gen, demo, prompt)
        gen.index.clear()
        gen.tiers.stack.flush()
        write, calls = gen.pools.write_slot, []

        def fail_at_the_second(*args):
            calls.append(1)
            if len(calls) == 2:
                raise error("the copy failed")
            write(*args)

        monkeypatch.setattr(gen.pools, "write_slot", fail_at_the_second)
        assert 63 < ask(gen, demo, [*prompt, 9]) <= 201  # that state is gone; a shallower one may be had
        assert gen.tiers.counts["miss_foreign"] + gen.tiers.counts["miss_io"] == 1
        assert ask(gen, demo, [*prompt, 9]) == 0
        gen.index.clear()
        assert gen.pool.num_slots == gen.pool.num_blocks == 0


def kept_states(gen) -> dict:
    """What the tiers are to hold of each state in the index: name of an entry -> its tensors."""
    return {
        _slice_name(_key_in(entry.node, entry.snapshot.position), heads): payload
        for entry in gen.index.entries()
        for heads, payload in zip(
            gen.tiers.slices, gen.pools.read_slices(entry.snapshot.slot, gen.tiers.slices), strict=True
        )
    }


def test_memory_that_is_used_again_at_once_does_not_change_what_is_on_its_way(demo):
    """A tier that takes 50 ms a write, and memory overwritten meanwhile: each entry is what the memory held."""

    class SlowWrites(HostTier):
        def put(self, key, payload):
            time.sleep(0.05)
            return super().put(key, payload)

    with KimiK3Generator(demo, tiers=(SlowWrites(1 << 28),), **SMALL) as gen:
        ask(gen, demo, prompt_of(200, 4))
        wanted = kept_states(gen)
        gen.index.clear()
        gen.pools.buffer.fill_(255)  # what a next request would do, and sooner than any
        assert gen.stats()["tiers"]["by_tier"]["transfers"]["pending_writes"] > 0
        gen.tiers.stack.flush()
        (tier,) = gen.tiers.stack.tiers
        assert len(wanted) > 3
        for name, payload in wanted.items():
            stored = tier.get(name)
            assert stored.keys() == payload.keys() and all(torch.equal(stored[k], payload[k]) for k in payload)
        gen.pools.buffer.zero_()


def test_a_copy_from_the_device_under_way_is_waited_for_where_the_bytes_are_read(demo):
    """As on a GPU: the copies of one `read_slices` are whole only when what `copied` returned says so, and no step waits."""
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL) as gen:
        ask(gen, demo, prompt_of(200, 4))
        wanted = kept_states(gen)
        begun, threads, waits = [], [], []

        def to_cpu(source, dtype=None):
            value, target = source.to(dtype or source.dtype, copy=True), torch.full_like(source, 3, dtype=dtype)
            begun.append((target.contiguous(), value))
            return begun[-1][0]

        def copied():
            copies, whole = begun[:], threading.Event()
            begun.clear()

            def run():
                time.sleep(0.02)
                for target, value in copies:
                    target.copy_(value)
                whole.set()

            def wait():
                waits.append(threading.current_thread())
                assert whole.wait(10)

            threads.append(threading.Thread(target=run))
            threads[-1].start()
            return wait

        gen.pools._to_cpu, gen.pools.copied = to_cpu, copied
        gen.index.clear()
        assert threading.current_thread() not in waits
        gen.tiers.stack.flush()
        (tier,) = gen.tiers.stack.tiers
        for thread in threads:
            thread.join()
        assert len(wanted) > 3 and len(waits) >= len(wanted)
        for name, payload in wanted.items():
            stored = tier.get(name)
            assert stored.keys() == payload.keys() and all(torch.equal(stored[k], payload[k]) for k in payload)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "gone", "foreign"])
def test_a_damaged_entry_is_a_counted_miss_and_a_recompute(demo, tmp_path, damage):
    prompt = prompt_of(200, 2)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        ask(gen, demo, prompt)
    files = sorted(p for p in Path(tmp_path).rglob("*") if p.is_file() and p.stat().st_size > 200)
    assert files
    for place, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if damage == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "flipped":
            content[-7] ^= 4
            file.write_bytes(content)
        elif damage == "empty":
            file.write_bytes(b"")
        elif damage == "gone" and place % 2:
            file.unlink()
        elif damage == "foreign":
            file.write_bytes(files[place - 1].read_bytes())
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        assert ask(gen, demo, [*prompt, 9]) > 1
        counts = gen.stats()["tiers"]
        assert sum(n for name, n in counts.items() if name.startswith("miss_")) > 0 or damage == "gone"
        assert ask(gen, demo, [*prompt, 9, 9]) <= 2


def test_what_was_fetched_never_stands_on_another_prompts_block(demo):
    """Between the read and its use the hit got shorter, and now ends inside a block that goes on otherwise."""
    prompt = prompt_of(300, 1)
    other = prompt[:100] + prompt_of(60, 2)
    options = {**SMALL, "num_blocks": 60}
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **options) as gen:
        ask(gen, demo, prompt)
        gen.index.clear()
        gen.tiers.stack.flush()
        gen.generate([other], SamplingParams(max_new_tokens=1), snapshot_at=[100])
        gen.generate([prompt[:128]], SamplingParams(max_new_tokens=1))
        recorder = Recorder()
        params = SamplingParams(max_new_tokens=3, logits_processor=recorder)
        rid = gen.add([*prompt, 5], params)
        gen.step()
        request = gen._requests[rid]
        assert (request.fetch_state, request.fetch_first) == ("pending", 2)
        for entry in [e for e in gen.index.entries() if e.node.key == request.chain[1]]:
            gen.index.drop(entry.snapshot)
        assert gen.index.match(request.root, request.tokens).position == 100
        while gen.has_unfinished():
            gen.step()
        assert_equals_solo(demo, [*prompt, 5], gen.result(rid), recorder.rows, params)


def test_in_batch_invariant_mode_keys_name_the_parallel_degree(demo):
    """Only there: otherwise an entry names its heads, and another degree reads the slices that it wants."""
    for is_invariant in (False, True):
        with KimiK3Generator(demo, **SMALL | {"batch_invariant": is_invariant}) as gen:
            alone = gen._root_key(is_invariant)
            gen.agreement.tp_size = 2
            assert (gen._root_key(is_invariant) == alone) != is_invariant


class SlowTier(HostTier):
    """A host tier whose reads take 50 ms each, as a far disk's do."""

    def get(self, key):
        time.sleep(0.05)
        return super().get(key)


def test_reads_ahead_hide_a_slow_tier_behind_the_steps_of_others(demo):
    """At least 80 % of the time that reads take passes while steps run."""
    with KimiK3Generator(demo, tiers=(SlowTier(1 << 28),), **SMALL) as gen:
        for seed in range(5):
            ask(gen, demo, prompt_of(250, seed))
        gen.tiers.stack.flush()
        gen.index.clear()
        gen.tiers.stack.flush()
        busy = gen.add(prompt_of(20, 77), SamplingParams(max_new_tokens=150, stop_token_ids=()))
        gen.step()
        rids = [gen.add([*prompt_of(250, seed), 4], SamplingParams(max_new_tokens=2)) for seed in range(5)]
        idle = 0.0
        while gen.has_unfinished():
            before, start = gen._forward_seconds, time.perf_counter()
            gen.step()
            if gen._forward_seconds == before:
                idle += time.perf_counter() - start
        gen.result(busy)
        assert all(gen.result(rid).reused_tokens >= 192 for rid in rids)
        read = gen.stats()["tiers"]["by_tier"]["transfers"]["read_us"] / 1e6
        assert read > 1 and idle < 0.2 * read


def test_a_state_is_read_by_another_parallel_degree(demo):
    """Slices of heads: what one pool stored, two halves restore, and the other way round."""
    layout = PoolLayout(demo)
    pools = DevicePools(layout, 4, demo.device)
    pools.buffer.copy_(torch.randint(0, 100, pools.buffer.shape, dtype=torch.uint8))
    slices = pools.head_slices()
    stored = dict(zip(slices, pools.read_slices(2, slices), strict=True))
    half = len(slices) // 2
    for part in (slices[:half], slices[half:], slices):
        target = DevicePools(layout, 4, demo.device)
        for heads in part:
            target.write_slot(0, heads, stored[heads])
        for (states, windows), (wanted, wanted_windows) in (
            (target.pools[i], pools.pools[i]) for i in pools.pools if len(pools.pools[i]) == 2
        ):
            low, high = part[0][0], part[-1][1]
            assert torch.equal(states[0, low:high], wanted[2, low:high])
            shape = (3, states.shape[1], -1)
            given, expected = windows[0].unflatten(-1, shape), wanted_windows[2].unflatten(-1, shape)
            assert torch.equal(given[:, :, low:high], expected[:, :, low:high])


WRITER = """
    import sys, random
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from solo import DEMO, load
    from kimi_k3 import KimiK3Generator, SamplingParams
    from kimi_k3.engine.tiers import DiskTier
    model = load(DEMO)
    gen = KimiK3Generator(model, tiers=(DiskTier({folder!r}, 1 << 28),), max_num_seqs=4, num_blocks=12,
                          max_tokens_per_step=128, batch_invariant=True)
    print("ready", flush=True)
    rng = random.Random({seed})
    while True:
        prompt = [rng.randrange(3, 1000) for _ in range(rng.randrange(60, 200))]
        gen.generate([prompt], SamplingParams(max_new_tokens=2))
        print(*prompt, flush=True)
"""


def kill_in_the_middle_of_writes(demo, folder, times):
    rng = random.Random(0)
    for seed in range(times):
        script = textwrap.dedent(WRITER).format(tests=str(Path(__file__).parent), folder=str(folder), seed=seed)
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        prompts = []
        assert process.stdout.readline().strip() == "ready"
        for _ in range(rng.randrange(2, 5)):
            prompts.append([int(word) for word in process.stdout.readline().split()])
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.wait()
        with KimiK3Generator(demo, tiers=(DiskTier(folder, 1 << 28),), **SMALL) as gen:
            for prompt in prompts:
                ask(gen, demo, [*prompt, 5])


def test_a_kill_in_the_middle_of_writes_leaves_right_tokens(demo, tmp_path):
    kill_in_the_middle_of_writes(demo, tmp_path, 5)


@pytest.mark.slow
def test_fifty_kills_in_the_middle_of_writes_leave_right_tokens(demo, tmp_path):
    kill_in_the_middle_of_writes(demo, tmp_path, 50)


def test_a_tier_serves_one_generator_and_keeps_what_that_has_stored(demo):
    """A second generator over the same tier would take what the first one has stored with it when it closes."""
    tier, prompt = HostTier(1 << 27), prompt_of(200, 1)
    with KimiK3Generator(demo, tiers=(tier,), **SMALL) as gen:
        ask(gen, demo, prompt)
        gen.index.clear()
        gen.tiers.stack.flush()
        with pytest.raises(ValueError, match=r"^HostTier: want a tier .* in use"):
            KimiK3Generator(demo, tiers=(tier,), **SMALL)
        assert ask(gen, demo, [*prompt, 9]) <= 1
    for tiers, state in (((tier,), "closed"), ((HostTier(1 << 27),) * 2, "twice")):
        with pytest.raises(ValueError, match=f"^HostTier: want a tier .* {state}"):
            KimiK3Generator(demo, tiers=tiers, **SMALL)


def test_two_generators_share_a_folder(demo, tmp_path):
    prompt = prompt_of(200, 1)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as one:
        with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as two:
            assert ask(two, demo, prompt) == 200
        assert ask(one, demo, [*prompt, 9]) <= 1


@pytest.mark.parametrize("at_the_end", [False, True])
def test_what_the_queue_refuses_is_not_taken_to_be_stored(demo, tmp_path, at_the_end):
    """A path larger than the queue: stored again once there is room; at the end of the generator all of it is."""
    prompt = prompt_of(300, 8)
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL | {"num_blocks": 60}) as gen:
        stack = gen.tiers.stack
        put, (tier,) = threading.Event(), stack.tiers
        write = tier._put
        tier._put = lambda *args: put.wait() and write(*args)
        stack.max_pending_bytes = gen.pools.layout.block_bytes * 2
        ask(gen, demo, prompt)
        if not at_the_end:
            (last,) = [e for e in gen.index.entries() if e.snapshot.position == 300]
            gen.tiers.save(last)
            transfers = stack.stats()["transfers"]
            assert gen.tiers.counts["refused"] == transfers["refused"] == 1
            known = gen.tiers.known
            assert len(known) == gen.tiers.counts["stored_blocks"] < 4 and set(known.values()) <= set(last.path)
            assert gen.tiers.counts["stored_snapshots"] == 0
            put.set()
            for _ in range(20):
                stack.flush()
                gen.tiers.save(last)
            stack.max_pending_bytes = 1 << 30
            gen.tiers.save(last)
            stack.flush()
            gen.index.on_evict = None
            gen.index.clear()
            assert gen.tiers.counts["stored_snapshots"] == 1 and ask(gen, demo, [*prompt, 9]) <= 1
        put.set()
    with KimiK3Generator(demo, tiers=(DiskTier(tmp_path, 1 << 28),), **SMALL) as gen:
        assert ask(gen, demo, [*prompt, 9]) <= 1


@pytest.mark.parametrize("how", ["failed", "evicted"])
def test_what_did_not_get_into_a_tier_is_stored_again(demo, how):
    """A write that fails after it was queued, or an entry that the last tier drops: of a path that lives on."""
    prompt = prompt_of(300, 8)
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL | {"num_blocks": 60}) as gen:
        (tier,), write = gen.tiers.stack.tiers, gen.tiers.stack.tiers[0]._put
        ask(gen, demo, prompt)

        def fail(*args):
            raise OSError(28, "No space left on device")

        if how == "failed":
            tier._put = fail
        (last,) = [e for e in gen.index.entries() if e.snapshot.position == 300]
        gen.tiers.save(last)
        gen.tiers.stack.flush()
        if how == "evicted":
            tier._limit = 0
            tier._make_room(0)
            tier._limit = 1 << 28
        tier._put = write
        assert {*last.path[:4], last.snapshot} <= set(gen.tiers.known.values())  # not lost yet, as far as is known
        assert tier.stats()["entries"] == 0
        gen.index.clear()
        gen.tiers.stack.flush()
        assert gen.tiers.counts["lost"] > 4
        assert ask(gen, demo, [*prompt, 9]) <= 1


def test_what_was_restored_is_not_stored_again(demo):
    """Neither its blocks, one of them cut by the position, nor its state; what goes on from there is."""
    prompt = prompt_of(300, 8)
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL | {"num_blocks": 60}) as gen:
        store, (tier,) = gen.tiers, gen.tiers.stack.tiers

        def leave():
            before = Counter(store.counts)
            gen.index.clear()
            store.stack.flush()
            blocks, states = (store.counts[k] - before[k] for k in ("stored_blocks", "stored_snapshots"))
            return blocks, states, tier.stats()["puts"]

        ask(gen, demo, prompt)
        blocks, states, puts = leave()
        assert blocks >= 5 and states >= 1 and len(store.known) == 0  # nothing is remembered of what has left
        gen.generate([[*prompt, 9]], SamplingParams(max_new_tokens=1))
        assert store.counts["fetches"] == 1 and store.counts["restored_tokens"] == 300
        assert leave() == (1, 1, puts + 1 + len(store.slices))  # the last block and the state with one more token


def test_a_preempted_requests_blocks_are_hashed_once(demo, monkeypatch):
    hashed = []

    def chain(key, tokens):
        hashed.append(len(tokens))
        return prefix_index.chain(key, tokens)

    monkeypatch.setattr(tier_store, "chain", chain)
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL) as gen:
        rid = gen.add(prompt_of(70, 1), SamplingParams(max_new_tokens=300, ignore_eos=True))
        while len(gen._requests[rid].tokens) < 300:
            gen.step()
        request, size = gen._requests[rid], gen.block_size
        gen._preempt(request, "drop")
        for times in (300 // size - 70 // size, 0):
            hashed.clear()
            gen.tiers.look_up(request)
            assert hashed.count(size) == times
        whole = 300 // size * size
        ends = [request.root]
        for start in range(0, whole, size):
            ends.append(prefix_index.chain(ends[-1], request.tokens[start : start + size]))
        assert request.chain == ends[1:]
        while gen.has_unfinished():
            gen.step()
        assert len(gen.result(rid).token_ids) == 300


@pytest.mark.parametrize("scheduler", ["dependency_aware", "fcfs"])
def test_what_was_read_and_waits_for_a_seat_counts_as_read(demo, scheduler):
    """One seat, taken; states of some who wait are read ahead within the bound, and an urgent late one is served too."""
    options = SMALL | {"max_num_seqs": 1, "num_blocks": 60, "scheduler": scheduler}
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **options) as gen:
        prompts = [prompt_of(250, seed) for seed in range(5)]
        gen.generate(prompts, SamplingParams(max_new_tokens=1))
        gen.index.clear()
        gen.tiers.stack.flush()
        gen.tiers.max_reading_bytes = 1
        gen.add(prompt_of(20, 77), SamplingParams(max_new_tokens=60, ignore_eos=True))
        gen.step()
        params = SamplingParams(max_new_tokens=2)
        rids = [gen.add([*prompt, 4], params) for prompt in prompts[:4]]
        most = 0
        while gen.has_unfinished() and gen.num_steps < 3000:
            gen.step()
            most = max(most, sum(r.fetch_state in ("pending", "ready") for r in gen._requests.values()))
            if gen.num_steps == 40:  # comes before one whose state has been read
                rids.append(gen.add([*prompts[4], 4], params, priority=2))
        assert not gen.has_unfinished() and most <= 2
        assert all(gen.result(rid).reused_tokens >= 192 for rid in rids)


def test_reads_under_way_are_bounded(demo):
    """By bytes, though one of any size may go on; who has to wait is served afterwards."""
    with KimiK3Generator(demo, tiers=(SlowTier(1 << 28),), **SMALL) as gen:
        prompts = [prompt_of(250, seed) for seed in range(3)]
        for prompt in prompts:
            ask(gen, demo, prompt)
        gen.index.clear()
        gen.tiers.stack.flush()
        gen.tiers.max_reading_bytes = 1
        rids = [gen.add([*prompt, 4], SamplingParams(max_new_tokens=2)) for prompt in prompts]
        most = 0
        while gen.has_unfinished():
            gen.step()
            most = max(most, sum(request.fetch_state == "pending" for request in gen._requests.values()))
        assert most == 1 and all(gen.result(rid).reused_tokens == 250 for rid in rids)


def test_a_read_that_hangs_is_given_up_and_no_step_spins_meanwhile(demo, monkeypatch):
    """A disk that never answers: one limit for the request, not one for each state, then it computes."""
    monkeypatch.setattr(tier_store, "FETCH_SECONDS", 1.0)
    with KimiK3Generator(demo, tiers=(HostTier(1 << 28),), **SMALL) as gen:
        prompt = prompt_of(300, 3)
        ask(gen, demo, prompt)
        gen.index.clear()
        gen.tiers.stack.flush()
        answers, (tier,) = threading.Event(), gen.tiers.stack.tiers
        read = tier._get
        tier._get = lambda key: answers.wait() and read(key)
        rid = gen.add([*prompt, 9], SamplingParams(max_new_tokens=2))
        start, steps = time.monotonic(), gen.num_steps
        try:
            while gen.has_unfinished() and time.monotonic() < start + 20:
                gen.step()
            waited = time.monotonic() - start
        finally:
            answers.set()
        assert 1.0 <= waited < 10.0 and gen.num_steps - steps < 300
        assert gen.result(rid).reused_tokens == 0 and gen.tiers.counts["fetches"] == 1
        assert gen.tiers.counts["miss_timeout"] > 0


def test_hits_are_counted_by_where_they_lay(demo, tmp_path):
    """200 tokens that lie on disk, of which a host tier gets a copy when they are read."""
    prompt, server = prompt_of(200, 6), Server()
    params = SamplingParams(max_new_tokens=1)

    def hits(gen):
        stats = gen.stats()
        assert stats["hit_tokens"] == sum(value for name, value in stats.items() if name.startswith("hit_tokens_"))
        return {
            name.removeprefix("hit_tokens_"): n for name, n in stats.items() if name.startswith("hit_tokens_") and n
        }

    try:
        for tier in (DiskTier(tmp_path, 1 << 28), RemoteTier(server.url)):
            with KimiK3Generator(demo, tiers=(tier,), **SMALL) as gen:
                gen.generate([prompt], params)
                gen.generate([[*prompt, 5]], params)
                assert hits(gen) == {"device": 200}
        with KimiK3Generator(demo, tiers=(HostTier(1 << 28), DiskTier(tmp_path, 1 << 28)), **SMALL) as gen:
            gen.generate([[*prompt, 6]], params)
            assert hits(gen) == {"disk": 200}
            gen.index.clear()
            gen.tiers.stack.flush()
            gen.generate([[*prompt, 7]], params)
            gen.generate([[*prompt, 8]], params)
            assert hits(gen) == {"disk": 200, "host": 200, "device": 200}
            text = gen.prometheus()
            assert 'kimi_k3_hit_tokens_total{tier="host"} 200\n' in text
        with KimiK3Generator(demo, tiers=(RemoteTier(server.url),), **SMALL) as gen:
            gen.generate([prompt[:128]], params)  # what lies on the device already is no hit of the tier
            before = hits(gen)
            gen.generate([[*prompt, 6]], params)
            assert Counter(hits(gen)) - Counter(before) == {"remote": 200 - 128, "device": 128}
    finally:
        server.stop()


def test_a_generator_that_could_not_be_made_ends_its_tiers_and_their_threads(demo, tmp_path, monkeypatch):
    tiers = (HostTier(1 << 28), DiskTier(tmp_path, 1 << 28))
    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "weights_digest", lambda *_: (_ for _ in ()).throw(RuntimeError("no digest today")))
        with pytest.raises(RuntimeError, match="no digest today"):
            KimiK3Generator(demo, tiers=tiers, **SMALL)
    with pytest.raises(ValueError, match=r"HostTier: .* closed"):  # it ended with the generator
        KimiK3Generator(demo, tiers=tiers, **SMALL)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kimi_k3-tiers")]


def test_heads_that_cannot_be_stored_leave_the_tiers_free(demo, monkeypatch):
    tier, before = HostTier(1 << 28), set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(DevicePools, "head_slices", lambda _: (_ for _ in ()).throw(ValueError("tiers: want heads")))
        with pytest.raises(ValueError, match="tiers: want heads"):
            KimiK3Generator(demo, tiers=(tier,), **SMALL)
    assert set(threading.enumerate()) == before
    KimiK3Generator(demo, tiers=(tier,), **SMALL).close()
