"""Serving a transformer: which batch on how many devices, its latency, throughput and price.

Closed forms over `serving_time`: prefill and decode on the same devices, on separate
ones with the cache sent over, and with a draft model that speaks first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cost_models.closed_forms import formulas
from cost_models.closed_forms.serving import ServingTime, serving_time
from cost_models.closed_forms.transformer import Transformer
from cost_models.machines.dtypes import itemsize
from cost_models.machines.model import Hardware

SECONDS_PER_HOUR = 3600.0
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The load of a server.

    Attributes:
        context: Tokens of a prompt, and of the cache while it is read.
        generated: Tokens of an answer.
        weight_dtype: Of weights in memory.
        cache_dtype: Of the cache in memory.
    """

    context: int
    generated: int
    weight_dtype: str = DTYPE
    cache_dtype: str = DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One batch on one set of devices that share every weight.

    Attributes:
        hardware: Name and topology of the devices.
        devices: Their number.
        time: The times of serving.
        ttft_s: Time to the first token: a prefill alone, and one decoding step.
        tokens_per_s: Decoded by all devices, prefills interleaved on the same devices.
        crossover_batch: Sequences from which weights multiply for longer than they stream.
        bound: The largest part of a decoding step: "weights", "cache", "compute" or "links".
        dollars_per_million: Per million decoded tokens; None without a price.
    """

    hardware: str
    devices: int
    time: ServingTime
    ttft_s: float
    tokens_per_s: float
    crossover_batch: float
    bound: str
    dollars_per_million: float | None

    @property
    def batch(self) -> int:
        return self.time.batch

    @property
    def token_s(self) -> float:
        """Seconds per token of one sequence."""
        return self.time.decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """Prefill and decode on separate sets of devices of one kind.

    Attributes:
        prefill_per_decode: Prefill sets that keep one decoding set busy.
        transfer_s: Sending one prompt's cache, over every device's way out.
        requests_per_s: Finished by one decoding set.
        tokens_per_s: Decoded per device, those of prefill counted.
        dollars_per_million: Per million decoded tokens; None without a price.
    """

    server: Server
    prefill_per_decode: float
    transfer_s: float
    requests_per_s: float
    ttft_s: float
    tokens_per_s_per_device: float
    dollars_per_million: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """A draft model proposes `length` tokens, the target reads them at once.

    Attributes:
        accepted: Expected tokens per round.
        round_s: Drafting and one reading by the target.
        token_s: Seconds per token.
        speedup: Over decoding without a draft.
    """

    length: int
    accepted: float
    round_s: float
    token_s: float
    speedup: float


def servers(
    model: Transformer,
    hardware: Iterable[Hardware],
    workload: Workload,
    batches: Sequence[int],
    *,
    price_per_hour: float | None = None,
) -> tuple[Server, ...]:
    """Every batch that fits on every hardware; by latency, then by throughput.

    Args:
        model: The transformer.
        hardware: Sets of devices.
        workload: Prompt and answer, and in which types they are held.
        batches: Batches to try; the largest that fits is tried, too.
        price_per_hour: Dollars per hour of one device.
    """
    found: list[Server] = []
    for place in hardware:
        largest = _time(model, place, workload, 1).largest_batch
        for batch in sorted({b for b in batches if b <= largest} | ({largest} if largest else set[int]())):
            found.append(_server(model, place, workload, batch, price_per_hour))
    return tuple(sorted(found, key=lambda s: (s.token_s, -s.tokens_per_s)))


def front(found: Sequence[Server]) -> tuple[Server, ...]:
    """Servers that no other beats in latency and in tokens per second and device at once."""
    return tuple(
        s
        for s in found
        if not any(
            o.token_s <= s.token_s and _rate(o) >= _rate(s) and (o.token_s < s.token_s or _rate(o) > _rate(s))
            for o in found
        )
    )


def disaggregated(
    server: Server, hardware: Hardware, workload: Workload, *, price_per_hour: float | None
) -> Disaggregated:
    """The same server with prefill on devices of its own."""
    time = server.time
    link = "scale_out" if "scale_out" in hardware.chip.links else "domain"
    rate = hardware.devices * hardware.number(f"{link}.one_way_bytes_per_s")
    transfer_s = time.cache_bytes / rate
    ratio = time.prefill_servers(workload.generated)
    devices = server.devices * (1 + ratio)
    per_device = time.tokens_per_s / devices
    return Disaggregated(
        server=server,
        prefill_per_decode=ratio,
        transfer_s=transfer_s,
        requests_per_s=time.requests_per_s(workload.generated),
        ttft_s=time.prefill_s + transfer_s + time.decode_s,
        tokens_per_s_per_device=per_device,
        dollars_per_million=_dollars(price_per_hour, 1, per_device),
    )


def speculative(
    target: Transformer,
    draft: Transformer,
    hardware: Hardware,
    workload: Workload,
    *,
    batch: int,
    acceptance: float,
    lengths: Sequence[int] = (1, 2, 3, 4, 5, 6, 8),
) -> Speculative:
    """The best number of drafted tokens (Leviathan et al. 2023, arXiv:2211.17192, equation 1).

    Args:
        target: The model that is served.
        draft: A smaller one with the same vocabulary.
        hardware: Both run on it.
        workload: Prompt, answer and types.
        batch: Sequences.
        acceptance: Chance that a drafted token is kept, each on its own.
        lengths: Drafted tokens to try.
    """
    alone = _time(target, hardware, workload, batch)
    drafted = _time(draft, hardware, workload, batch)
    found: list[Speculative] = []
    for length in lengths:
        accepted = formulas.tokens_per_round(acceptance, length)
        round_s = length * drafted.decode_s + _reading_s(target, hardware, alone, batch, length + 1)
        found.append(
            Speculative(
                length=length,
                accepted=accepted,
                round_s=round_s,
                token_s=round_s / accepted,
                speedup=alone.decode_s * accepted / round_s,
            )
        )
    return max(found, key=lambda s: s.speedup)


def _reading_s(model: Transformer, hardware: Hardware, alone: ServingTime, batch: int, tokens: int) -> float:
    """One step of the target over so many tokens of each sequence: weights and caches stream once."""
    flops_per_s, bytes_per_s = _rates(hardware)
    load_s = alone.parameter_bytes / bytes_per_s
    multiply_s = 2 * batch * tokens * model.active_parameters / flops_per_s
    return float(batch * alone.cache_bytes / bytes_per_s + max(multiply_s, load_s) + tokens * alone.exchange_s)


def _time(model: Transformer, hardware: Hardware, workload: Workload, batch: int) -> ServingTime:
    return serving_time(
        model,
        hardware,
        batch=batch,
        context=workload.context,
        weight_dtype=workload.weight_dtype,
        cache_dtype=workload.cache_dtype,
    )


def _rates(hardware: Hardware) -> tuple[float, float]:
    machine = hardware.place({"tensor": hardware.devices})
    unit = machine.matmul_unit(DTYPE)
    return (
        hardware.devices * unit.peak_flops_per_s * unit.achieved_fraction,
        hardware.devices / float(machine.hbm_s(1.0)),
    )


def _server(
    model: Transformer, hardware: Hardware, workload: Workload, batch: int, price_per_hour: float | None
) -> Server:
    time = _time(model, hardware, workload, batch)
    flops_per_s, bytes_per_s = _rates(hardware)
    cache_s = batch * time.cache_bytes / bytes_per_s
    multiply_s = 2 * batch * model.active_parameters / flops_per_s
    waits = {"weights": time.load_s, "cache": cache_s, "links": time.exchange_s}
    if multiply_s > time.load_s:
        waits["compute"] = multiply_s
        del waits["weights"]
    # A request occupies its place in the batch for its steps, and all devices for its prefill.
    request_s = workload.generated * time.decode_s + batch * time.prefill_s
    rate = batch * workload.generated / request_s
    return Server(
        hardware=hardware.name,
        devices=hardware.devices,
        time=time,
        ttft_s=time.prefill_s + time.decode_s,
        tokens_per_s=rate,
        crossover_batch=formulas.critical_batch(
            flops_per_s,
            bytes_per_s,
            weight_itemsize=itemsize(workload.weight_dtype) * model.parameters / model.active_parameters,
        ),
        bound=max(waits, key=lambda name: waits[name]),
        dollars_per_million=_dollars(price_per_hour, hardware.devices, rate),
    )


def _rate(server: Server) -> float:
    return server.tokens_per_s / server.devices


def _dollars(price_per_hour: float | None, devices: float, tokens_per_s: float) -> float | None:
    return None if price_per_hour is None else price_per_hour * devices / SECONDS_PER_HOUR / tokens_per_s * 1e6
