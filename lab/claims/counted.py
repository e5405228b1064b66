"""Quantities of claims on one device that are counted: they hold on any machine."""

from __future__ import annotations

from lab.claims.device import Device, Quantity, matches
from lab.claims.metrics import Missing
from lab.claims.spans import exact
from lab.measure.intervals import Interval

# torch is imported in functions: not every paper needs it.


def parameters(device: Device, network: str) -> Interval:
    """Count a network's parameters."""
    model = device.blueprint(network).model
    return exact(sum(each.numel() for each in model.parameters()))


def weight_layers(device: Device, network: str) -> Interval:
    """Count convolutions and fully connected layers."""
    from torch import nn

    layers = device.blueprint(network).model.modules()
    return exact(sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in layers))


def fc_parameter_share(device: Device, network: str) -> Interval:
    """Divide the parameters of fully connected layers by all."""
    from torch import nn

    model = device.blueprint(network).model
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    connected = sum(each.numel() for layer in layers for each in layer.parameters())
    return exact(connected / sum(each.numel() for each in model.parameters()))


def network_operations(device: Device, network: str, layers: str | None = None) -> Interval:
    """Count operations of the forward pass of one sample.

    Args:
        layers: a regular expression for the paths or classes of the layers to count; None: all
            operations, between layers too.
    """
    by_layer, everything = _operations(device, network)
    if layers is None:
        return exact(everything)
    return exact(sum(number for names, number in by_layer.items() if matches(layers, *names)))


def operation_share(device: Device, network: str, layers: str) -> Interval:
    """Divide the forward operations of the layers that match by all."""
    chosen, all_of_them = (network_operations(device, network, each) for each in (layers, None))
    return exact(chosen.mid / all_of_them.mid)


def step_bytes(device: Device, network: str, batch_size: int, optim: str = "sgd") -> Interval:
    """Compute the memory that a training step needs at most (lab.device.footprint)."""
    from lab.device.footprint import Step, footprint
    from lab.settings.config import load
    from lab.settings.overrides import own_choices
    from lab.training.optim import make_optim

    plan = device.blueprint(network)
    optimizer = make_optim(load(own_choices([f"optim={optim}"])).optim, batch_size).optimizer
    step = Step(
        plan.data.input_shape, plan.data.input_dtype, plan.target, plan.task.loss, optimizer
    )
    return exact(footprint(plan.model, step, batch_size).total_bytes)


def executed_share(
    device: Device, network: str, layer: str, algorithm: str, tile: int = 1
) -> Interval:
    """Divide the operations of a convolution's forward pass by an algorithm by its definition's.

    Args:
        tile: rows and columns that a kernel of algorithm=gemm computes at once.

    Raises:
        Missing: the algorithm refuses the convolution.
    """
    from lab.convolution.algorithms import ALGORITHMS, Gemm
    from lab.convolution.layer import convolutions_of
    from lab.convolution.problem import Pass

    plan, batch = device.blueprint(network), device.batch(network)
    shape, dtype = plan.data.input_shape, plan.data.input_dtype
    problem = convolutions_of(plan.model, shape, dtype, batch)[layer]
    chosen = Gemm((tile, tile)) if algorithm == Gemm.name else ALGORITHMS[algorithm]
    if chosen.refusal(problem, Pass.FORWARD):
        raise Missing
    return exact(chosen.total(problem, Pass.FORWARD).operations / problem.operations)


def refusals(device: Device, network: str, algorithm: str) -> Interval:
    """Count the convolutions that an algorithm refuses."""
    from lab.convolution.algorithms import ALGORITHMS
    from lab.convolution.layer import convolutions_of
    from lab.convolution.problem import Pass

    plan = device.blueprint(network)
    found = convolutions_of(plan.model, plan.data.input_shape, plan.data.input_dtype, 1)
    chosen = ALGORITHMS[algorithm]
    return exact(sum(chosen.refusal(each, Pass.FORWARD) is not None for each in found.values()))


def operations_per_output(
    _device: Device,
    algorithm: str,
    kernel: int,
    size: int = 27,
    channels: int = 96,
    filters: int = 256,
    batch: int = 256,
) -> Interval:
    """Divide what an algorithm executes in a forward pass by outputs and input channels.

    Args:
        kernel, size: sides of the square filters and images; outputs are as large as inputs.
        channels, filters, batch: of the convolution; by default conv2 of slide 8 of Kim et al.
    """
    from lab.convolution.algorithms import ALGORITHMS
    from lab.convolution.problem import Pass, Problem

    sides = {"size": (size, size), "kernel": (kernel, kernel), "padding": (kernel // 2,) * 2}
    problem = Problem(
        batch=batch, channels=channels, filters=filters, stride=(1, 1), groups=1, **sides
    )
    executed = ALGORITHMS[algorithm].total(problem, Pass.FORWARD).operations
    return exact(executed / (batch * filters * channels * size**2))


def _operations(device: Device, network: str) -> tuple[dict[tuple[str, str], int], int]:
    """Count forward operations of one sample by (path, class) of the innermost module, and all."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    plan = device.blueprint(network)
    data, model = plan.data, plan.model
    inputs = torch.zeros(1, *data.input_shape, dtype=data.input_dtype, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs)
    by_module = counter.get_flop_counts()
    root = type(model).__name__
    by_layer = {
        (path, type(layer).__name__): sum(by_module.get(f"{root}.{path}", {}).values())
        for path, layer in model.named_modules()
        if path and not any(True for _ in layer.children())
    }
    return by_layer, counter.get_total_flops()


COUNTED: dict[str, Quantity] = {
    "parameters": parameters,
    "weight_layers": weight_layers,
    "fc_parameter_share": fc_parameter_share,
    "network_operations": network_operations,
    "operation_share": operation_share,
    "step_bytes": step_bytes,
    "executed_share": executed_share,
    "refusals": refusals,
    "operations_per_output": operations_per_output,
}
