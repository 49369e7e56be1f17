"""What a compiled program does on one chip, read off its text: products, memory traffic, collectives, sorts.

XLA's own cost analysis counts the body of a loop once. Here it counts as often as it runs.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "u64": 8, "f64": 8}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# They move nothing, or what they move is counted where it is read and written.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
        "partition-id", "replica-id", "opt-barrier", "async-start", "async-update", "async-done", "copy-done", "iota"}
SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Array:
    """``hbm``: whether it lies in the chip's large memory (and not in its fast one)."""

    dtype: str
    shape: tuple[int, ...]
    hbm: bool

    @property
    def bytes(self):
        return math.prod(self.shape) * BYTES.get(self.dtype, 0)  # 0: tokens and keys


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line: ``arrays`` is its result, a list since that may be a tuple; ``scope`` what the source calls it."""

    name: str
    arrays: list[Array]
    opcode: str
    operands: list[str]
    line: str
    root: bool

    def attribute(self, name, default=None):
        found = re.search(rf"\b{name}=([^\s,]+)", self.line)
        return found[1] if found else default

    @property
    def scope(self):
        found = re.search(r'op_name="([^"]*)"', self.line)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    instructions: list[Instruction]

    @functools.cached_property
    def named(self):
        return {i.name: i for i in self.instructions}

    @property
    def root(self):
        return next(i for i in self.instructions if i.root)

    def inputs(self, instruction):
        """The arrays of its operands."""
        return [array for name in instruction.operands if name in self.named for array in self.named[name].arrays]


def _closing(text, start):
    """Index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"unbalanced: {text[start:start + 80]}")


def _arrays(text):
    return [Array(dtype, tuple(int(n) for n in shape.split(",") if n), not re.search(r"S\([1-9]", layout or ""))
            for dtype, shape, layout in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?", text)]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """-> (computations by name, name of the first one that runs)."""
    computations, entry, name, lines = {}, None, None, []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head and not line.startswith(" "):
            name, lines = head[2], []
            entry = name if head[1] else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(lines), None
        elif name and " = " in line:
            left, right = line.strip().split(" = ", 1)
            end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
            opening = right.index("(", end)
            lines.append(Instruction(
                left.removeprefix("ROOT ").lstrip("%"), _arrays(right[:end]), right[end:opening].strip(),
                re.findall(r"%([\w.\-]+)", right[opening:_closing(right, opening)]), right, left.startswith("ROOT ")))
    return computations, entry


def _trips(computations, computation, loop):
    """How often a loop from 0 in steps of 1 runs, read off its condition; 1 where it cannot be read."""
    condition = computations[loop.attribute("condition").lstrip("%")]
    start = computation.named.get(loop.operands[0])

    def constant(instruction, where):
        if instruction.opcode == "constant":
            return int(re.search(r"constant\((-?\d+)\)", instruction.line)[1])
        if instruction.opcode == "get-tuple-element" and where is condition and start and start.opcode == "tuple":
            inner = computation.named.get(start.operands[int(instruction.attribute("index"))])
            return constant(inner, computation) if inner is not None else None
        if instruction.opcode in ("copy", "bitcast") and instruction.operands[0] in where.named:
            return constant(where.named[instruction.operands[0]], where)
        return None

    compare = condition.root
    found = [constant(condition.named[name], condition) for name in compare.operands if name in condition.named]
    return max([n for n in found if n], default=1)


def executed(text: str) -> Iterator[tuple[Instruction, Computation, int, bool, dict]]:
    """Every instruction that runs: (instruction, its computation, how often, whether inside of a fusion, all of them)."""
    computations, entry = parse(text)

    def walk(computation, times, fused):
        for i in computation.instructions:
            yield i, computation, times, fused, computations
            called = [name.lstrip("%") for name in re.findall(r"\b(?:calls|to_apply|body)=(%[\w.\-]+)", i.line)]
            if i.opcode == "conditional":
                called = re.findall(r"%([\w.\-]+)", re.search(r"branch_computations=\{([^}]*)\}", i.line)[1]
                                    if "branch_computations" in i.line else
                                    " ".join(re.findall(r"(?:true|false)_computation=(%[\w.\-]+)", i.line)))
            if i.opcode in ("while", "fusion", "call", "conditional", "async-start"):
                for name in called:
                    inner = times * _trips(computations, computation, i) if i.opcode == "while" else times
                    yield from walk(computations[name], inner, fused or i.opcode == "fusion")

    yield from walk(computations[entry], 1, False)


@functools.cache
def _pairs(n_in, n_out, size, stride, pad, lhs_dilate, rhs_dilate):
    """How many (output, kernel) positions of one window dimension meet an input that is there."""
    at = np.arange(n_out)[:, None] * stride - pad + np.arange(size) * rhs_dilate
    return int(np.sum((at % lhs_dilate == 0) & (at >= 0) & (at < (n_in - 1) * lhs_dilate + 1)))


def product_flops(instruction, computation) -> int:
    """2 x multiplications of a dot or a convolution (which is what a product is on TPU), else 0."""
    if instruction.opcode == "dot":
        left = computation.named[instruction.operands[0]].arrays[0].shape
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.line)[1]
        return 2 * math.prod(instruction.arrays[0].shape) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    if instruction.opcode != "convolution":
        return 0
    lhs, rhs, out = (a.shape for a in (*(computation.named[name].arrays[0] for name in instruction.operands[:2]),
                                       instruction.arrays[0]))
    left, right, result = re.split("_|->", instruction.attribute("dim_labels"))
    window = re.search(r"window=\{([^}]*)\}", instruction.line)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    flops = 2 * out[result.index("b")] * out[result.index("f")] * rhs[right.index("i")]
    flops //= int(instruction.attribute("batch_group_count", 1))
    for d in range(len(lhs) - 2):
        field = lambda name, default: fields[name].split("x")[d] if name in fields else default
        flops *= _pairs(lhs[left.index(str(d))], out[result.index(str(d))], int(field("size", 1)), int(field("stride", 1)),
                        int(field("pad", "0_0").split("_")[0]), int(field("lhs_dilate", 1)), int(field("rhs_dilate", 1)))
    return flops


def is_collective(instruction) -> bool:
    """Whether it is one, or starts one."""
    return instruction.opcode.removesuffix("-start") in COLLECTIVES


def hbm_bytes(arrays) -> int:
    """Bytes of those arrays that lie in the large memory."""
    return sum(a.bytes for a in arrays if a.hbm)


def memory_bytes(instruction, computation, computations) -> int:
    """What it reads from and writes to the large memory. Of an array that a fusion only slices, the slice; of those that
    a collective works on beside a fusion, nothing."""
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0
    size = hbm_bytes
    if instruction.opcode in SLICES:
        return 2 * size(instruction.arrays)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * size(computation.named[instruction.operands[1]].arrays)
    if instruction.opcode.endswith("-start"):  # its result is what will be there, and the operand, in either order
        given, made = instruction.arrays[:2] if instruction.opcode != "copy-start" else instruction.arrays[1::-1]
        read = made.bytes if instruction.opcode.removesuffix("-start") in SLICES else given.bytes
        return read * given.hbm + size([made])
    if instruction.opcode != "fusion":
        return size(computation.inputs(instruction)) + size(instruction.arrays)
    inner = computations[instruction.attribute("calls").lstrip("%")]
    beside = {(a.dtype, a.shape) for i in inner.instructions if is_collective(i) for a in (*i.arrays, *inner.inputs(i))}
    size = lambda arrays: hbm_bytes(a for a in arrays if (a.dtype, a.shape) not in beside)
    total = 0
    for parameter in (i for i in inner.instructions if i.opcode == "parameter"):
        users = [i for i in inner.instructions if parameter.name in i.operands]
        if any(not array.hbm for array in parameter.arrays):
            continue
        if users and all(i.opcode in SLICES and i.operands[0] == parameter.name for i in users):
            total += sum(a.bytes for i in users for a in i.arrays)
        elif not (users and all(i.opcode == "dynamic-update-slice" and i.operands[0] == parameter.name for i in users)):
            total += size(parameter.arrays)
    written = inner.root
    if written.opcode == "dynamic-update-slice" and instruction.arrays[0].hbm:
        return total + sum(a.bytes for a in inner.named[written.operands[1]].arrays)
    return total + size(instruction.arrays)


def group_size(instruction, devices) -> int:
    """How many chips take part in one collective with each other."""
    found = re.search(r"replica_groups=(\{\{[\d,]*\}|\[[\d,]+\]|mesh\[[^\]]*\] \{[^}]*\})", instruction.line)
    if not found:
        return devices
    groups = found[1]
    if groups.startswith("{{"):
        return groups.count(",") + 1
    if groups.startswith("["):
        return int(groups.strip("[]").split(",")[-1])
    sizes, used = groups.split("] {")
    return math.prod(int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", sizes) if f"'{axis}'" in used)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of collective with one shape (of several arrays together: the largest). ``bytes`` and ``wire``: of all
    ``count`` of them, what a chip has or gets of the whole, and what it sends where it is done in a ring of ``group``."""

    kind: str
    array: str
    scope: str
    group: int
    count: int
    bytes: int
    wire: int


def _collective(instruction, computation, devices, fusion):
    kind = instruction.opcode.removesuffix("-start")
    given = computation.inputs(instruction)
    size, n = sum(a.bytes for a in given), group_size(instruction, devices)
    if kind == "all-reduce" and "reduce-scatter" in fusion:
        kind = "reduce-scatter"  # TPU writes it as a fusion of both halves
    if kind == "all-gather":
        size *= n
    wire = {"all-reduce": 2 * size * (n - 1) // n, "collective-permute": size}.get(kind, size * (n - 1) // n)
    array = max(instruction.arrays if kind == "all-gather" else given, key=lambda a: a.bytes)
    return kind, f"{array.dtype}[{','.join(map(str, array.shape))}]", n, size, wire


def _scope(instruction, computations):
    """Its scope, or that of the first of its parts that has one."""
    if instruction.scope or instruction.opcode != "fusion":
        return instruction.scope
    inner = computations[instruction.attribute("calls").lstrip("%")].instructions
    return next((scope for scope in (_scope(i, computations) for i in inner) if scope), "")


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one chip, loops counted as often as they run: ``flops`` of products, ``bytes`` of memory traffic and ``cycles``,
    the compiler's own estimate of all but collectives, each by part of the program; ``collectives``, most bytes first;
    ``sorts``: widths that are sorted; ``gathers``: shapes that all-gathers result in."""

    flops: dict[str, int]
    bytes: dict[str, int]
    cycles: dict[str, int]
    collectives: list[Collective]
    sorts: list[int]
    gathers: list[tuple[int, ...]]


def work(text: str, devices: int, part=lambda scope: "") -> Work:
    """Reads a compiled program. part: name of the part that a scope ("jit(step)/.../draft_layer_0/...") belongs to."""
    flops, traffic, cycles, collectives = (collections.Counter() for _ in range(4))
    sorts, gathers, channels = [], [], set()
    for i, computation, times, fused, computations in executed(text):
        flops[part(i.scope)] += times * product_flops(i, computation)
        if not fused:
            where = part(_scope(i, computations))
            traffic[where] += times * memory_bytes(i, computation, computations)
            cycles[where] += times * sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', i.line))
        if is_collective(i):
            # One that runs beside other work is repeated in each fusion that it runs beside, under the same channel.
            channel = i.attribute("channel_id")
            if channel in channels:
                continue
            channels |= {channel} - {None}
            if fused:
                traffic[part(i.scope)] += times * hbm_bytes((*i.arrays, *computation.inputs(i)))
            fusion = next((name for name, c in computations.items() if c is computation), "")
            kind, array, n, size, wire = _collective(i, computation, devices, fusion)
            collectives[kind, array, part(i.scope), n] += np.array([times, times * size, times * wire], object)
            if kind == "all-gather":
                gathers.extend(a.shape for a in i.arrays)
        if i.opcode == "sort":
            dimension = int(re.search(r"dimensions=\{(\d+)\}", i.line)[1])
            sorts.append(i.arrays[0].shape[dimension])
    found = [Collective(*key, *map(int, counts)) for key, counts in collectives.items()]
    return Work(dict(+flops), dict(+traffic), dict(+cycles), sorted(found, key=lambda c: -c.wire), sorts, gathers)
