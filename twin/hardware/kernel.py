"""What the code of our kernel costs on a device: numbers of a kernel, and not of the hardware.

Files of `calibration/kernels` hold them. Two kernels have other costs on one device; a device that
nobody has run a kernel on takes those of another device, by rules (twin/hardware/derive.py).
"""

from __future__ import annotations

from twin.frozen import frozen
from twin.hardware.number import Number


@frozen(kw_only=True)
class Unpacking:
    """A weight of a stored format unpacked and multiplied, relative to one of BF16, where no rate
    of that format is known.
    """

    int8_ratio: Number
    fp8_ratio: Number
    int4_ratio: Number
    mxfp4_ratio: Number
    nvfp4_ratio: Number
    # GGUF's blocks, which only CPUs multiply
    q4_0_ratio: Number
    q4_1_ratio: Number
    q5_0_ratio: Number
    q5_1_ratio: Number
    q8_0_ratio: Number
    q4_k_ratio: Number
    q5_k_ratio: Number
    q6_k_ratio: Number
    gguf_mixed_32_ratio: Number
    gguf_mixed_256_ratio: Number


@frozen(kw_only=True)
class AttentionLaws:
    """How parts of attention grow on a block of warps."""

    # a turn on tensor cores between other stages, relative to one that a probe repeats
    in_layers_ratio: Number
    softmax_steps: Number  # of a turn on tensor cores, in steps of 16 elements of a head
    later_heads_ratio: Number  # of six heads' time, what a further round of the warps takes
    # of six heads' time, next to one part for each head: parts of a block's first round
    first_parts: Number
    # of a round of positions: parts for each position that a thread holds, and for none
    position_parts: Number
    round_parts: Number
    sum_parts: Number  # of a round, next to one part for each doubling of a position's threads
    further_set_ratio: Number  # of a turn on tensor cores, for each further set of query heads
    wider_head_ratio: Number  # of a head's way to attention, for each 64 elements beyond the first
    further_round_ratio: Number  # of an item's start and end, for each further round of publishing
    # latencies of a round of splits into two column slices of a thread that holds weights
    crowded_rounds: Number
    found_ratio: Number  # a split that another thread has added up, relative to one that is loaded


@frozen(kw_only=True)
class PromptCosts:
    """A pass over a prompt by blocks of threads; on tensor cores unless another is said."""

    # of a stage's products behind the barrier, and of the slowest block's end, next to the first
    # step's latency
    start_cycles: Number
    # from barrier to barrier of a product's steps: a wait for copies, products, the next copies
    turn_cycles: Number
    fetched_bytes_per_s: Number  # weights and activations into all blocks' shared memory
    # a tile of positions and 128 query rows; for each element of a head in 64 positions
    scan_cycles: Number
    scan_element_cycles: Number
    scan_cap_cycles: Number  # caps of 64 positions' scores
    head_cycles: Number  # without tensor cores: a head normed and turned by a warp
    head_element_cycles: Number  # an element of such a head, its place in the cache included
    stored_cycles: Number  # an element that a block stores for others
    gelu_cycles: Number  # a gate that is a GELU
    decode_cycles: Number  # a low-bit weight decoded to 16 bits by a block
    block_multiply_adds: Number  # of a router's logits, in a cycle of a block
    sort_entry_cycles: Number  # entries sorted by expert: of a thread, for each of its entries
    sort_cycles: Number  # and for the counts of all threads before it
    # without tensor cores: a warp's look at as many positions a thread for one query head
    look_cycles: Number
    cap_cycles: Number  # caps of that look's scores
    # a round's few tokens: weights of a block's tiles multiplied; a warp's loads of a row and of
    # activations, to their products; the same where activations lie in the second-level cache
    few_bytes_per_cycle: Number
    few_turn_cycles: Number
    few_far_cycles: Number


@frozen(kw_only=True)
class KernelCosts:
    """Of a block of either kind."""

    fp16_bytes_per_s: Number  # weights in shared memory multiplied, by weight type
    bf16_bytes_per_s: Number
    fp32_bytes_per_s: Number
    row_s: Number  # fixed cost of one output row within a block (reduce, scale, publish)
    element_s: Number  # one activation element gathered, summed or normed by a block
    stage_s: Number  # fixed cost of one stage within a block (set-up, block barriers)
    kv_bytes_per_s: Number  # attention throughput of one block over cached keys and values
    sample_element_s: Number  # one logit examined by the sampling block
    unpacking: Unpacking
    # 16-bit weights that tensor cores take from shared memory next to the activations of several
    # tokens, or attention's entries next to so many query heads
    tensor_bytes_per_cycle: Number
    prompt: PromptCosts | None = None  # None: prompts are read token by token
    # between kernels of a model: what a block knows goes through memory; None: nothing
    border_s: Number | None = None


@frozen(kw_only=True)
class CoreKernel(KernelCosts):
    """A block is a core, or one group of threads, that does one thing at a time."""

    reset_elements: Number  # words of a core's vector, which resets fill at once
    # over a recurrent state where no threads keep it: it meets the key and the query, and is
    # written anew
    state_passes: Number
    # where None is nothing: one attention item's fixed cost, next to its cached bytes
    item_s: Number | None = None
    merged_s: Number | None = None  # an element of a split's output added up for its projection
    gate_s: Number | None = None  # one activation of a gate, and its product
    # a further token of a round, relative to the first, whose weights are unpacked for all; None: 1
    further_token_ratio: Number | None = None
    # bytes of codes, without their scales, that a core decodes and multiplies in its own cache;
    # `core_kind` in twin/cost/formats.py says which formats each stands for. None: as `unpacking`
    int8_bytes_per_s: Number | None = None
    fp8_bytes_per_s: Number | None = None
    int4_bytes_per_s: Number | None = None
    mxfp4_bytes_per_s: Number | None = None
    nvfp4_bytes_per_s: Number | None = None
    q4_0_bytes_per_s: Number | None = None
    q4_1_bytes_per_s: Number | None = None
    q5_0_bytes_per_s: Number | None = None
    q5_1_bytes_per_s: Number | None = None
    q8_0_bytes_per_s: Number | None = None
    q4_k_bytes_per_s: Number | None = None
    q5_k_bytes_per_s: Number | None = None
    q6_k_bytes_per_s: Number | None = None
    gguf_mixed_32_bytes_per_s: Number | None = None
    gguf_mixed_256_bytes_per_s: Number | None = None


@frozen(kw_only=True)
class WarpKernel(KernelCosts):
    """A block of warps: teams of them share the tiles that a loader thread copies, and each looks
    at cached positions.
    """

    copy_s: Number  # from one bulk copy of a loader to its next
    # added where it waits for one of those under way before the next: a window smaller than the
    # ring
    watch_s: Number
    # a warp's fence between weights that it prefetches before a stage's inputs and the slots that
    # it then leaves
    leave_s: Number
    # a warp waits for its rows of a column slice and loads them, before it multiplies
    slice_s: Number
    reduction_s: Number  # a warp ends the dot products of a few rows: sums over its threads
    item_s: Number  # fixed cost of one attention item: set-up, the warps' partial results merged
    # what the loads of one block bring of exchanged elements, whole sectors counted, while all
    # blocks gather
    gather_bytes_per_s: Number
    # attention's partial outputs in few lines: each further time that all blocks load the same
    # words at once
    crowd_s: Number
    # a split's partial outputs weighed and added, for each column slice of which a thread holds
    # elements
    split_s: Number
    vector_s: Number  # a gathered vector normed
    # fixed cost of a stage whose normed input comes by way of shared memory, four elements from
    # each thread, instead of a stage's and a vector's
    by_fours_s: Number
    prefetch_s: Number  # more for it where the stage's first weights were prefetched
    # more for a down projection whose teams hold all slices of their first rows before its inputs
    # are there
    group_s: Number
    # from the last tile of a batch of rows to its sums, beyond the time in which that tile is
    # consumed
    tile_s: Number
    # before attention, for six heads of 64 elements (queries, a key, a value): the item looked up,
    # heads awaited and turned; a probe of attention has none
    heads_s: Number
    # one round of the cached positions that a block compares side by side, already on their way
    round_s: Number
    # on tensor cores: a warp's 16 cached positions of a head of 128 elements, with up to four query
    # heads
    unit_s: Number
    # codes in shared memory that all warps decode and multiply, without waits and sums: INT8, FP8,
    # INT4, FP4
    int8_bytes_per_s: Number
    fp8_bytes_per_s: Number
    int4_bytes_per_s: Number
    fp4_bytes_per_s: Number
    quantise_s: Number  # a column slice of an input quantised, where threads multiply integers
    step_s: Number  # once through a loop over a tile's low-bit rows, of experts
    # an item of a recurrent state: convolved, looked at, published; and each element of it that a
    # thread holds
    state_s: Number
    state_element_s: Number
    compare_s: Number  # a thread's look at another expert's logit, where blocks choose
    # with low-bit weights a thread has 16 neighbours of a gathered vector, which four threads
    # load together: until each has its own
    settle_s: Number
    shared_bytes_per_cycle: Number  # that threads load from shared memory
    attention: AttentionLaws
