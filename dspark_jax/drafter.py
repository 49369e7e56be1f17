"""The drafter: backbone, transition and confidence output as one Linen module, and `propose`, which drafts a block.

B batch, S context length, N blocks, J slots per block, T draft positions, V target vocabulary, Vd draft vocabulary,
D model width, R transition rank, M candidates per position.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from dspark_jax import anchors as anchors_lib
from dspark_jax import copying, layers
from dspark_jax import packing
from dspark_jax import transitions
from dspark_jax.backbone import Backbone, BackboneConfig
from dspark_jax.candidates import Choice, top_candidates
from dspark_jax.confidence import LAW_STATISTICS, LAW_UNITS, confidence_logits, law_statistics, law_term
from dspark_jax.lattice import draft_among
from dspark_jax.sequential import sequential_draft
from dspark_jax.union import successor_table, union_among
from dspark_jax.verification import SparseDraft

EXECUTIONS = ("sequential", "lattice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that decides what a drafter computes.

    ``block_length`` is T, the number of drafts. ``layout`` says which slot predicts what (`dspark_jax.anchors`).
    ``target_layer_ids``: -1 is the embedding output, i the raw output of decoder layer i. ``draft_vocab_size`` smaller
    than ``vocab_size`` means that only some target ids can be drafted. ``execution`` and ``candidates`` are what the
    checkpoint asks to be run with; a caller may choose otherwise. ``input_embedding_scale`` multiplies the embeddings
    that go into the slots. The confidence head sees h_t, ``confidence_with_predecessor`` the predecessor's row A[x_{t-1}], and
    ``confidence_with_law`` what the law that draft t comes from is like (`statistics_of_law`), at temperature 1 and over
    the tokens that ``execution`` lets it be. ``confidence_temperatures``: what calibration divides each position's confidence logit by; empty
    for a head that was not calibrated. ``copy_length`` is N, the longest agreement with earlier text that the copy term tells
    apart (`dspark_jax.copying`); 0 for a drafter without that term.
    """

    backbone: BackboneConfig
    vocab_size: int
    draft_vocab_size: int
    block_length: int
    layout: str
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    transition: str = "vanilla"
    rank: int = 256
    execution: str = "sequential"
    candidates: int = 16
    confidence: bool = False
    confidence_with_predecessor: bool = True
    confidence_with_law: bool = False
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    input_embedding_scale: float = 1.0
    confidence_temperatures: tuple[float, ...] = ()
    copy_length: int = 0

    def __post_init__(self):
        transitions.get_transition(self.transition)
        anchors_lib.slots(self.layout, self.block_length)
        check_execution(self, self.execution, self.candidates)
        for field in ("block_length", "vocab_size", "draft_vocab_size", "candidates"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; must be at least 1")
        if self.block_length > 1024:
            raise ValueError(f"block_length: {self.block_length}; at most 1024")
        if not 0 <= self.copy_length <= 64:  # compared one by one
            raise ValueError(f"copy_length: {self.copy_length}; must lie in [0, 64], 0 for none")
        if self.rank < 1 and self.transition != "none":
            raise ValueError(f"rank: {self.rank}; must be at least 1 for the transition {self.transition!r}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size: {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id: {self.mask_token_id}; must lie in [0, {self.vocab_size})")
        if list(self.target_layer_ids) != sorted(set(self.target_layer_ids)) or not self.target_layer_ids:
            raise ValueError(f"target_layer_ids: {self.target_layer_ids}; must be strictly increasing and not empty")
        if self.target_layer_ids[0] < -1:
            raise ValueError(f"target_layer_ids: {self.target_layer_ids}; the smallest allowed is -1, the embedding")
        temperatures = self.confidence_temperatures
        if temperatures and (not self.confidence or len(temperatures) < self.block_length):
            raise ValueError(f"confidence_temperatures: {len(temperatures)} of them; allowed: none, or for a drafter with a "
                             f"confidence head one for each of the {self.block_length} drafts")
        if not all(0 < t < float("inf") for t in temperatures):
            raise ValueError(f"confidence_temperatures: {temperatures}; must be positive and finite")
        if self.confidence and self.confidence_with_predecessor and self.transition == "none":
            raise ValueError("confidence_with_predecessor: needs a transition that has a predecessor table, not 'none'")
        if self.confidence_with_law and not self.confidence:
            raise ValueError("confidence_with_law: True; allowed: False for a drafter without a confidence head")

    @property
    def usable_candidates(self):
        """M of lattice execution: ``candidates``, or the whole draft vocabulary where that is smaller."""
        return min(self.candidates, self.draft_vocab_size)

    @property
    def slots(self):
        """J, the slots of a block."""
        return anchors_lib.slots(self.layout, self.block_length)


def check_execution(config, execution, candidates):
    """Raises ValueError for an execution or a number of candidates that this drafter cannot run with."""
    if execution not in EXECUTIONS:
        raise ValueError(f"execution: unknown name {execution!r}; allowed: {', '.join(EXECUTIONS)}")
    if execution == "lattice":
        if not transitions.get_transition(config.transition).first_order:
            raise ValueError(
                f"execution: 'lattice' scores pairs of neighbouring candidates before any is chosen, but the transition "
                f"{config.transition!r} depends on the whole path; use 'sequential'")
        if not 1 <= candidates <= config.draft_vocab_size:
            raise ValueError(f"candidates: {candidates}; must lie in [1, {config.draft_vocab_size}], the draft vocabulary")


class TransitionParameters(nn.Module):
    """Declares the arrays of a transition: N(0, 0.02), vectors zero."""

    config: DrafterConfig

    @nn.compact
    def __call__(self):
        c = self.config
        shapes = transitions.get_transition(c.transition).parameter_shapes(
            c.vocab_size, c.draft_vocab_size, c.backbone.hidden_size, c.rank)
        for name, shape in shapes.items():
            self.param(name, nn.initializers.normal(0.02) if len(shape) > 1 else nn.initializers.zeros, shape)


class ConfidenceParameters(nn.Module):
    config: DrafterConfig

    @nn.compact
    def __call__(self):
        c = self.config
        width = c.backbone.hidden_size + (c.rank if c.confidence_with_predecessor else 0)
        self.param("kernel", nn.initializers.normal(0.02), (width,))
        self.param("bias", nn.initializers.zeros, ())
        if c.confidence_with_law:
            LawParameters(LAW_STATISTICS + (2 if c.copy_length else 0), name="law")()


class LawParameters(nn.Module):
    statistics: int

    @nn.compact
    def __call__(self):
        self.param("kernel", nn.initializers.lecun_normal(), (self.statistics, LAW_UNITS))
        self.param("bias", nn.initializers.zeros, (LAW_UNITS,))
        self.param("output", nn.initializers.zeros, (LAW_UNITS,))


class CopyParameters(nn.Module):
    config: DrafterConfig

    @nn.compact
    def __call__(self):
        c = self.config
        self.param("weight", nn.initializers.zeros, (c.copy_length,))
        self.param("kernel", nn.initializers.zeros, (c.backbone.hidden_size,))


class DrafterModule(nn.Module):
    """Parameters: {"backbone": ..., "transition": ..., "copying": {"weight" [N], "kernel" [D]}, "confidence": {"kernel"
    [D (+ R)], "bias" [] and perhaps "law": ...}}, the last two where the drafter has them."""

    config: DrafterConfig

    def setup(self):
        c = self.config
        self.backbone = Backbone(c.backbone)
        self.transition = TransitionParameters(c)
        if c.copy_length:
            self.copying = CopyParameters(c)
        if c.confidence:
            self.confidence = ConfidenceParameters(c)

    def context(self, features, positions):
        return self.backbone.context(features, positions)

    def block(self, embeddings, positions, context, visible, context_positions=None):
        """As `Backbone.block`, but only the T slots that predict: [B, N, T, D]."""
        hidden = self.backbone.block(embeddings, positions, context, visible, context_positions)
        return hidden[..., -self.config.block_length:, :]

    def everything(self):  # init must touch every parameter
        c = self.config
        width = c.backbone.hidden_size
        context = self.context(jnp.zeros((1, 1, len(c.target_layer_ids) * width)), jnp.zeros((1, 1), jnp.int32))
        self.block(jnp.zeros((1, 1, c.slots, width)), jnp.zeros((1, 1, c.slots), jnp.int32), context,
                   jnp.ones((1, 1, 1), bool))
        self.transition()
        if c.copy_length:
            self.copying()
        if c.confidence:
            self.confidence()


def init_params(config, key):
    """Fresh parameters, a nested dict of float32 arrays."""
    return DrafterModule(config).init(key, method=DrafterModule.everything)["params"]


def abstract_params(config):
    """The tree of `init_params` with shapes instead of arrays."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def base_logits(config, head_rows, hidden):
    """U = softcap(multiplier * h head^T): hidden [..., D], head_rows [Vd, D] -> [..., Vd], summed in float32."""
    logits = layers.table_logits(hidden, head_rows)
    return layers.scale_logits(logits, config.output_multiplier, config.final_logit_softcapping)


def slot_embeddings(config, embedding, ids):
    """What goes into the slots: embedding [V, D], ids int [...] -> [..., D]."""
    x = embedding[ids]
    return x if config.input_embedding_scale == 1 else x * jnp.asarray(config.input_embedding_scale, x.dtype)


def confidence_probabilities(config, logits):
    """The calibrated chance of each draft to survive, given that those before it did: logits [..., T] -> [..., T].

    A block shorter than the one calibrated has the temperatures of its positions.
    """
    temperatures = jnp.array(config.confidence_temperatures[:config.block_length] or 1.0, logits.dtype)
    return jax.nn.sigmoid(logits / temperatures)


def statistics_of_law(ids, scores, log_normalizer, predecessors, copied, choose=top_candidates):
    """What the confidence head sees of the law that each draft comes from: [..., T, F] of `confidence.law_statistics` and, of
    a drafter that copies, `copying.statistics`. Nothing is learnt through them.

    ids int (draft ids) and scores [..., T, M]: what a draft may be, and what its law is the softmax of, at temperature 1;
    log_normalizer [..., T]: of the law over all draft tokens, None where the M are all; predecessors int [..., T];
    copied: `copying.Copied` of [..., T] or None.
    """
    scores, log_normalizer, copied = jax.lax.stop_gradient((scores, log_normalizer, copied))
    of_law = law_statistics(scores, log_normalizer, choose)
    if copied is None:
        return of_law
    return jnp.concatenate([of_law, copying.statistics(copied, predecessors, ids, scores)], axis=-1)


def block_confidence(config, params, hidden, predecessors, law=None):
    """Logit of each draft's chance to survive, given its predecessors int [..., T]; None without a confidence head.

    law [..., T, F]: `statistics_of_law`; None: without the term that needs them.
    """
    if not config.confidence:
        return None
    head = params["confidence"]
    embedding = transitions.embed(params["transition"], predecessors) if config.confidence_with_predecessor else None
    logits = confidence_logits(head["kernel"], head["bias"], hidden, embedding)
    return logits if law is None else logits + law_term(head["law"], law)


def training_hidden(config, params, embedding, features, tokens, anchors, keep, documents=None):
    """Hidden states [B, N, T, D] of N blocks per sequence, each seeing the features before its anchor.

    embedding [V, D] of the target; features [B, S, taps * D]; tokens int [B, S]; anchors int and keep bool [B, N];
    documents int [B, S] where sequences are packed (see `dspark_jax.packing`): a block sees those of its own document.
    """
    module, variables = DrafterModule(config), {"params": params}
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    visible, positions, starts = index[:, None, :] < anchors[:, :, None], index, anchors
    if documents is not None:
        visible &= documents[:, None, :] == anchors_lib.gather(documents, anchors)[:, :, None]
        positions = packing.positions(documents)
        starts = anchors_lib.gather(positions, anchors)
    context = module.apply(variables, features, positions, method=DrafterModule.context)
    ids = anchors_lib.block_tokens(tokens, anchors, keep, config.slots, config.mask_token_id)
    return module.apply(
        variables, slot_embeddings(config, embedding, ids), anchors_lib.block_positions(starts, config.slots), context,
        visible, positions, method=DrafterModule.block)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """A drafted block: ``tokens`` int [B, T] (target ids), ``q`` the law they were drawn from (`SparseDraft` of
    [B, T, M] or a dense float32 [B, T, Vd]), ``confidence`` logits [B, T] or None; ``finite`` bool [B]: no NaN and no
    infinity was met on the way."""

    tokens: jax.Array
    q: SparseDraft | jax.Array
    confidence: jax.Array | None
    finite: jax.Array


def block_hidden(config, params, embedding, context, anchors, starts):
    """Hidden states [B, T, D] of the slots that predict, one block behind each anchor; arguments as in `propose`."""
    ids = jnp.full((anchors.shape[0], 1, config.slots), config.mask_token_id, jnp.int32).at[:, 0, 0].set(anchors)
    context = jax.tree.map(lambda heads: heads.swapaxes(1, 2), context)
    visible = jnp.arange(context[0][0].shape[1]) < starts[:, None, None]
    with jax.named_scope("draft_backbone"):
        return DrafterModule(config).apply(
            {"params": params}, slot_embeddings(config, embedding, ids),
            anchors_lib.block_positions(starts[:, None], config.slots), context, visible,
            method=DrafterModule.block)[:, 0]


def propose(config, params, embedding, head_rows, draft_to_target, context, anchors, starts, keys, temperature,
            execution, candidates, successors=None, choose=top_candidates, text=None):
    """Draft T tokens behind each anchor.

    embedding [V, D], head_rows [Vd, D], draft_to_target int [Vd] or None, context: cache of key/value pairs
    [B, K, S, C] whose positions before ``starts`` are filled; anchors int [B], at positions ``starts`` int [B]; keys [B];
    temperature scalar or [B]. Lattice execution takes the ``candidates`` best tokens of each position, found by
    ``choose`` (`dspark_jax.candidates`) in logits [B, T, Vd], and adds those of successors int [V, K] or None.
    text int [B, S']: the tokens up to ``starts``, where the copy term looks; a drafter that has one needs it, and raises
    ValueError without.
    """
    if config.copy_length and text is None:
        raise ValueError(f"text: None; allowed: the tokens so far, for a drafter of copy_length {config.copy_length}")
    temperature = jnp.broadcast_to(temperature, anchors.shape)
    transition, table = transitions.get_transition(config.transition), params.get("transition", {})
    hidden = block_hidden(config, params, embedding, context, anchors, starts)
    with jax.named_scope("draft_head"):
        logits = base_logits(config, head_rows, hidden)
    copied = None
    if config.copy_length:
        with jax.named_scope("copy"):
            to_draft = lambda tokens: copying.draft_ids(tokens, draft_to_target)
            copied = jax.vmap(lambda *block: copying.behind(params["copying"], *block, to_draft))(text, starts, hidden)
    if execution == "lattice":
        with jax.named_scope("candidates"):
            best, unary = copying.admit(*choose(logits, candidates), logits, copied)
        with jax.named_scope("lattice"):
            block = copied, best, unary, hidden, anchors, keys, temperature
            if successors is None:
                draft = lambda copied, *block: draft_among(transition, table, *block, draft_to_target, copied)
            else:
                block = *block, logits
                draft = lambda copied, *block: union_among(transition, table, *block, successors, draft_to_target, copied)
            tokens, ids, probabilities = jax.vmap(draft)(*block)
        q, scores = SparseDraft(ids, probabilities), None
    else:
        with jax.named_scope("sequential"):
            tokens, q, scores = jax.vmap(
                lambda u, h, a, k, t, c: sequential_draft(transition, table, u, h, a, k, t, draft_to_target, c)
            )(logits, hidden, anchors, keys, temperature, copied)
        if draft_to_target is not None:
            q = SparseDraft(jnp.broadcast_to(draft_to_target, q.shape), q)
    predecessors, seen = jnp.concatenate([anchors[:, None], tokens[:, :-1]], axis=1), None
    if config.confidence_with_law:
        everything, log_normalizer = jnp.arange(logits.shape[-1]), None
        if execution == "lattice":  # those along the path, of the base logits' candidates
            phi = transitions.teacher_forced_phi(transition, table, predecessors, hidden)
            scores = unary + transitions.bias_at(table, phi, best)
            corrected = logits + transitions.bias(table, phi)
            if copied is not None:
                scores += copying.term(copied, predecessors, best)
                corrected += copying.term(copied, predecessors, everything)
            log_normalizer = jax.nn.logsumexp(corrected, axis=-1)
        seen = statistics_of_law(best if execution == "lattice" else everything, scores, log_normalizer, predecessors, copied)
    law = q.probabilities if isinstance(q, SparseDraft) else q
    finite = jnp.all(jnp.isfinite(logits), axis=(1, 2)) & jnp.all(jnp.isfinite(law), axis=(1, 2))
    return Proposal(tokens, q, block_confidence(config, params, hidden, predecessors, seen), finite)


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A drafter ready to run: ``config``, ``params``, and the tables it works with.

    ``embedding`` [V, D] and ``head_rows`` [Vd, D] are usually the target's (rows of the draft vocabulary only);
    ``owns_tables`` says that they are not. A drafter read without its target has None there and cannot decode.
    ``draft_to_target`` int32 [Vd] maps draft ids to target ids, None where both are the same.
    ``target``: what is known of the target's config, "num_target_layers" and "max_position_embeddings".
    ``successors`` int32 [V, K] or None: more candidates for lattice execution, from `with_successors`.
    ``choose``: how lattice execution finds the best tokens, a function of `dspark_jax.candidates`: on TPU
    `approximate_candidates`, over a vocabulary laid out on a mesh `over_mesh`.
    """

    config: DrafterConfig
    params: dict
    embedding: jax.Array | None
    head_rows: jax.Array | None
    draft_to_target: jax.Array | None = None
    owns_tables: bool = False
    target: dict = dataclasses.field(default_factory=dict)
    successors: jax.Array | None = None
    choose: Choice = top_candidates

    def arrays(self):
        """What a compiled program needs."""
        return {"params": self.params, "embedding": self.embedding, "head_rows": self.head_rows,
                "draft_to_target": self.draft_to_target, "successors": self.successors}


def with_successors(drafter, K):
    """The same drafter, which in lattice execution adds the K likeliest successors of each token to the candidates.

    Computes their table, once over all tokens: V Vd R multiplications. K = 0: a drafter without one.
    Raises ValueError for a transition without a table or not of first order, and where K is not in 0..Vd.
    """
    c = drafter.config
    if not 0 <= K <= c.draft_vocab_size:
        raise ValueError(f"K: {K}; must lie in [0, {c.draft_vocab_size}], the draft vocabulary")
    if K == 0:
        return dataclasses.replace(drafter, successors=None)
    check_execution(c, "lattice", 1)
    if c.transition == "none":
        raise ValueError("transition: 'none' knows no successors of a token; only a transition with tables does")
    tables = {name: drafter.params["transition"][name] for name in ("predecessor", "successor")}
    return dataclasses.replace(drafter, successors=successor_table(tables, K))


def check_fit(config, target):
    """Raises ValueError where a drafter of this config cannot draft for a `TargetConfig`."""
    for what, ours, theirs in (("vocab_size", config.vocab_size, target.vocab_size),
                               ("hidden_size", config.backbone.hidden_size, target.hidden_size)):
        if ours != theirs:
            raise ValueError(f"{what}: the drafter has {ours}, the target {theirs}; they must be equal")
    if config.target_layer_ids[-1] >= target.num_hidden_layers:
        raise ValueError(f"target_layer_ids: {config.target_layer_ids}; the target's layers are "
                         f"0..{target.num_hidden_layers - 1}")


def attach(config, params, target, draft_to_target=None, embedding=None, head_rows=None):
    """A drafter for ``target``, on its embedding and output tables unless it brings its own: [V, D] and [Vd, D].

    Raises ValueError where the two do not fit.
    """
    check_fit(config, target.config)
    if (draft_to_target is None) != (config.draft_vocab_size == config.vocab_size):
        raise ValueError("draft_to_target: needed exactly where draft_vocab_size is smaller than vocab_size")
    owns_tables = embedding is not None or head_rows is not None
    if draft_to_target is not None:
        draft_to_target = jnp.asarray(draft_to_target, jnp.int32)
    if embedding is None:
        embedding = target.embedding()
    if head_rows is None:
        head_rows = target.head_rows() if draft_to_target is None else target.head_rows()[draft_to_target]
    facts = {"num_target_layers": target.config.num_hidden_layers,
             "max_position_embeddings": target.config.max_position_embeddings}
    return Drafter(config, params, embedding, head_rows, draft_to_target, owns_tables, facts)
