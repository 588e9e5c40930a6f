"""The table of all that rsa_hf hooks in transformers and PEFT (`peft/hooks.py`): `HOOKS`.

Nothing else of these libraries is replaced, except for the attention classes listed in `architectures/table.py`, which
are wrapped when a model with such a class is patched or loaded. PEFT's tuner of a model with RSA heads gets a subclass
of its class (`peft/merging.py`); `models/` and `training/` subclass their public base classes. Plain models run
transformers' own code, except for one look-up of the child `rsa` in each attention call, and checks when they are
built, loaded and saved.
"""

from __future__ import annotations

import logging

from rsa_hf.integration import what_fits
from rsa_hf.integration.attention import wrap_get_interface
from rsa_hf.integration.hooks import Hook, install_hooks
from rsa_hf.integration.loading import wrap_load_pretrained_model, wrap_post_init
from rsa_hf.integration.locks import wrap_dict_from_json_file, wrap_to_json_file
from rsa_hf.integration.paged import wrap_init_continuous_batching
from rsa_hf.integration.peft import hooks as peft_hooks
from rsa_hf.integration.saving import wrap_save_pretrained, wrap_upload_modified_files
from rsa_hf.integration.trainer import wrap_load_from_checkpoint
from rsa_hf.models import register_all

__all__ = ["HOOKS", "TRANSFORMERS_HOOKS", "install"]

logger = logging.getLogger(__name__)

PRETRAINED_MODEL = "transformers.modeling_utils:PreTrainedModel"
CONFIG = "transformers.configuration_utils:PreTrainedConfig"

TRANSFORMERS_HOOKS = (
    Hook(
        "transformers.modeling_utils:AttentionInterface",
        "get_interface",
        ("self", "attn_implementation", "default"),
        wrap_get_interface,
        purpose="mix recurrence into the output of attention modules that have a child `rsa`",
    ),
    Hook(
        PRETRAINED_MODEL,
        "post_init",
        ("self",),
        wrap_post_init,
        purpose="build the RSA heads that the plan in a config asks for",
    ),
    Hook(
        PRETRAINED_MODEL,
        "_load_pretrained_model",
        ("model", "state_dict", "checkpoint_files", "load_config"),
        wrap_load_pretrained_model,
        purpose="check the files of a checkpoint before they are read, and that its tensors match its plan",
    ),
    Hook(
        PRETRAINED_MODEL,
        "save_pretrained",
        ("self", "save_directory", "is_main_process", "state_dict"),
        wrap_save_pretrained,
        purpose="save heads only together with their plan, and write the model card",
    ),
    Hook(
        CONFIG,
        "to_json_file",
        ("self", "json_file_path"),
        wrap_to_json_file,
        purpose="lock config.json, so that a transformers without rsa_hf refuses a patched checkpoint",
    ),
    Hook(
        CONFIG,
        "_dict_from_json_file",
        ("cls", "json_file"),
        wrap_dict_from_json_file,
        purpose="take the locks of config.json off in memory",
    ),
    Hook(
        "transformers.utils.hub:PushToHubMixin",
        "_upload_modified_files",
        ("self", "working_dir", "repo_id"),
        wrap_upload_modified_files,
        purpose="write the model card again, which push_to_hub overwrites before it uploads; add an adapter's plan",
        essential=False,
    ),
    Hook(
        "transformers.trainer:Trainer",
        "_load_from_checkpoint",
        ("self", "resume_from_checkpoint"),
        wrap_load_from_checkpoint,
        purpose="refuse to resume from a checkpoint with another plan: the Trainer reads its tensors only",
        essential=False,
    ),
    Hook(
        "transformers.generation.continuous_batching.continuous_api:ContinuousMixin",
        "init_continuous_batching",
        ("self", "generation_config", "continuous_batching_config"),
        wrap_init_continuous_batching,
        purpose="keep continuous batching from flash attention and CUDA graphs, or refuse it before its thread starts",
        essential=False,
    ),
)

HOOKS = (*TRANSFORMERS_HOOKS, *peft_hooks.HOOKS)


def install() -> None:
    """Install all hooks, and register the models of `rsa_hf.models` with the Auto classes.

    Repeating it changes nothing. A PEFT that does not fit gets none of its hooks, with a warning; `rsa_hf.peft` then
    raises an ImportError.

    Raises:
        ImportError: an essential hook does not fit the installed transformers.
    """
    install_hooks(TRANSFORMERS_HOOKS, what_fits())
    register_all()
    try:
        peft_hooks.install()
    except ImportError as error:
        logger.warning("Adapters with RSA heads cannot be saved or loaded: %s", error)
