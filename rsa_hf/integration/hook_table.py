"""The table of all that rsa_hf hooks in transformers and PEFT (`peft/adapter_hooks.py`): `HOOKS`.

Nothing else of these libraries is replaced, except for the attention classes listed in `architectures/table.py`, which
are wrapped when a model with such a class is patched or loaded. The PEFT tuner of a model with RSA heads changes to a
subclass of its class. Plain models run their own code, except for one look-up of the child `rsa` in each attention
call, and checks when they are built, loaded and saved.
"""

import logging

from rsa_hf.integration import what_fits
from rsa_hf.integration.attention import wrap_get_interface
from rsa_hf.integration.hooks import Hook, install_hooks
from rsa_hf.integration.loading import wrap_load_from_checkpoint, wrap_load_pretrained_model, wrap_post_init
from rsa_hf.integration.locks import wrap_config_post_init, wrap_to_json_file
from rsa_hf.integration.paged import wrap_init_continuous_batching
from rsa_hf.integration.peft import adapter_hooks
from rsa_hf.integration.saving import wrap_save_pretrained, wrap_upload_modified_files
from rsa_hf.models import register_all

logger = logging.getLogger(__name__)

ATTENTION = "transformers.modeling_utils:AttentionInterface"
MODEL = "transformers.modeling_utils:PreTrainedModel"
CONFIG = "transformers.configuration_utils:PreTrainedConfig"
HUB = "transformers.utils.hub:PushToHubMixin"
TRAINER = "transformers.trainer:Trainer"
BATCHING = "transformers.generation.continuous_batching.continuous_api:ContinuousMixin"

TRANSFORMERS_HOOKS = (
    Hook(ATTENTION, "get_interface", wrap_get_interface, "mix recurrence into the output of attention"),
    Hook(MODEL, "post_init", wrap_post_init, "build the RSA heads that the plan in a config asks for"),
    Hook(
        MODEL, "_load_pretrained_model", wrap_load_pretrained_model, "check a checkpoint, and its tensors by its plan"
    ),
    Hook(MODEL, "save_pretrained", wrap_save_pretrained, "save heads only with their plan, and write the model card"),
    # A transformers without rsa_hf would load a patched checkpoint as a plain model.
    Hook(CONFIG, "to_json_file", wrap_to_json_file, "lock config.json"),
    Hook(CONFIG, "__post_init__", wrap_config_post_init, "take the locks of config.json off in memory"),
    # push_to_hub overwrites the card before it uploads.
    Hook(HUB, "_upload_modified_files", wrap_upload_modified_files, "upload model card and adapter plan", False),
    # The Trainer reads the tensors of a checkpoint, and never its config.
    Hook(TRAINER, "_load_from_checkpoint", wrap_load_from_checkpoint, "refuse to resume with another plan", False),
    Hook(BATCHING, "init_continuous_batching", wrap_init_continuous_batching, "keep it from flash attention", False),
)

HOOKS = (*TRANSFORMERS_HOOKS, *adapter_hooks.HOOKS)


def install() -> None:
    """Install all hooks, and register the models of `rsa_hf.models`; repeating it changes nothing.

    A PEFT that does not fit gets none of its hooks, with a warning; `rsa_hf.peft` then raises an ImportError.
    """
    install_hooks(TRANSFORMERS_HOOKS, what_fits())
    register_all()
    try:
        adapter_hooks.install()
    except ImportError as error:
        logger.warning("Adapters with RSA heads cannot be saved or loaded: %s", error)
