"""A report as kvd.proto has it."""

from typing import Literal

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.probing.values import Candidate, Device, Report, Way
from pdserve.kvd.probing.verdict import names, nominal, warnings


def encode_device(device: Device) -> kvd_pb2.Device:
    """One device."""
    return kvd_pb2.Device(name=device.name, kind=device.kind, bits_per_second=device.bits_per_second, up=device.up)


def decode_device(wire: kvd_pb2.Device) -> Device:
    """One device, of another daemon."""
    kind: Literal["net", "rdma"] = "rdma" if wire.kind == "rdma" else "net"
    return Device(wire.name, kind, wire.bits_per_second, wire.up)


def encode(report: Report) -> kvd_pb2.MeasureResponse:
    """All of it, with what is to be said of it."""
    return kvd_pb2.MeasureResponse(
        ways=[_way(way, report.devices) for way in report.ways],
        devices=[encode_device(device) for device in report.devices],
        scratch_bytes=report.scratch_bytes,
        seconds=report.seconds,
    )


def _way(way: Way, here: tuple[Device, ...]) -> kvd_pb2.Way:
    return kvd_pb2.Way(
        peer=way.peer,
        node=way.node,
        kvd_epoch=way.epoch,
        kind=way.kind.value,
        candidates=[_candidate(one, way.peer, here) for one in way.candidates],
        error=way.error,
        reason=way.reason,
        warnings=warnings(way, here),
    )


def _candidate(one: Candidate, peer: str, here: tuple[Device, ...]) -> kvd_pb2.Candidate:
    measured = one.measured
    return kvd_pb2.Candidate(
        transport=one.transport,
        used=one.used,
        why_not=one.why_not,
        lanes=measured.lanes,
        names=names(one, peer),
        error=measured.error,
        latency_seconds=measured.latency,
        speeds=[kvd_pb2.Speed(block_bytes=s.block_bytes, bytes=s.nbytes, seconds=s.seconds) for s in measured.speeds],
        nominal_bytes_per_second=nominal(measured.lanes, here),
    )
