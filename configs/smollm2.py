"""A DSpark drafter for SmolLM2-135M.

    python -m train.main --config=configs/smollm2.py --workdir=runs/smollm2

On two CPU cores the target features of 2,894 conversations took 27 minutes, and training in bfloat16 made 1,300 to 1,500
draft positions/s (experiments/six.py), both with other programs running. How the
drafter in drafters/smollm2-135m-dspark was trained is said in its README.
"""

from ml_collections import config_dict

from configs import targets


def get_config():
    config = config_dict.ConfigDict()
    config.target = "smollm2-135m-instruct"
    config.target_sizes = targets.smollm2_135m()  # for train.compile, which has no weights
    config.seed = 0
    config.init_from = config_dict.placeholder(str)  # a drafter or a run to go on from with fresh optimizer state
    config.init_backbone = config_dict.placeholder(str)  # one whose backbone to begin with, under fresh heads
    config.steps = 1900
    config.checkpoint_every = 100
    config.checkpoint_keep = 2  # the newest ones
    config.checkpoint_keep_every = config_dict.placeholder(int)  # and all steps that are multiples of this
    config.log_every = 1  # steps between lines of metrics.jsonl
    config.profile = config_dict.placeholder(str)  # steps to profile into WORKDIR/profile: "10:15", or a number of them

    config.mesh = config_dict.ConfigDict({"data": -1, "fsdp": 1, "tensor": 1})  # devices along each axis; -1: all others
    config.compute_dtype = "float32"  # of forward and backward; parameters and optimizer state are float32 in any case

    config.data = config_dict.ConfigDict()
    config.data.tokens = config_dict.placeholder(str)  # chat data (.jsonl) or tokens (.npz); None: what is shipped
    config.data.conversations = config_dict.placeholder(int)  # None: all
    config.data.max_length = 256  # tokens after which a conversation is cut
    config.data.row_length = config_dict.placeholder(int)  # pack conversations into rows of so many; None: one a row
    config.data.source_weights = config_dict.ConfigDict({"gsm8k": 2.0, "code": 2.0})

    config.evaluation = config_dict.ConfigDict()
    config.evaluation.prompts = 8  # of each set, decoded before and after training; 0: none
    config.evaluation.max_new_tokens = 64
    config.evaluation.every = 0  # steps between decoding them in the middle of training; 0: never
    config.evaluation.blocks_every = 100  # steps between logs of candidate and path metrics; 0: never

    config.features = config_dict.ConfigDict()
    config.features.cached = True
    config.features.directory = config_dict.placeholder(str)  # None: inside the work directory
    config.features.made_by = config_dict.placeholder(str)  # "deepspec" or "speculators"; None: by this program
    config.features.layer_ids = config_dict.placeholder(tuple)  # what speculators' files do not say: the layers, as
    config.features.layer_id_base = config_dict.placeholder(int)  # counted from this number of the first one,
    config.features.final_normed = config_dict.placeholder(bool)  # and whether the last states are final-normed

    config.drafter = config_dict.ConfigDict()
    config.drafter.num_hidden_layers = 2
    config.drafter.intermediate_size = config_dict.placeholder(int)  # None: the target's
    config.drafter.conv_kernel_size = 0
    config.drafter.block_length = 4
    config.drafter.layout = "anchor_first"
    config.drafter.target_layer_ids = (1, 8, 14, 20, 27)
    config.drafter.mask_token_id = 3
    config.drafter.draft_vocab_size = 8192
    config.drafter.transition = "vanilla"
    config.drafter.transition_init = "bigram"
    config.drafter.rank = 64
    config.drafter.execution = "lattice"
    config.drafter.candidates = 16
    config.drafter.confidence = True
    config.drafter.confidence_with_law = False  # its head also sees what the law of the draft is like; native layout only
    config.drafter.copy_length = 0  # longest agreement with earlier text that the copy term counts; 0: no such term
    config.drafter.trained = ("backbone", "transition", "copying", "confidence")  # which parts of it

    config.batch = config_dict.ConfigDict()
    config.batch.sequences = 8
    config.batch.anchors = 32
    config.batch.anchors_per_chunk = config_dict.placeholder(int)  # None: as many as fit into 64 MB of logits
    config.batch.micro_steps = 1  # parts that a batch is computed in, one after the other

    config.loss = config_dict.ConfigDict()  # dspark_jax/loss_weights.py says what each is
    config.loss.ce = 0.3
    config.loss.l1 = 0.9
    config.loss.confidence = 0.1
    config.loss.unary = 0.0
    config.loss.kl = 0.0
    config.loss.candidates = 0.0
    config.loss.expected_length = 0.0
    config.loss.decay = 4.0
    config.loss.position_weights = "decay"
    config.loss.smoothing = 0.5
    config.loss.missing_label = "exclude"
    config.loss.candidates_stop_gradient = False
    config.loss.candidates_warmup = 0

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.kind = "adamw"  # or "muon", for the backbone's matrices
    config.optimizer.lr = 1.2e-3
    config.optimizer.warmup_steps = 30
    config.optimizer.decay_steps = config_dict.placeholder(int)  # None: the rate reaches zero with the last step
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.99
    config.optimizer.weight_decay = 0.1
    config.optimizer.clip = 1.0
    return config
