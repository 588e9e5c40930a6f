"""A long run of streamed language-model training that is measured. test_soak.py runs this in a process of its own.

    python soak_run.py FOLDER SECONDS STEPS_BETWEEN_CHECKPOINTS BLOCK_SIZE

A short run comes first, since every first run leaves caches and a thread of tqdm behind. The long run evaluates and
writes a checkpoint at fixed intervals. After half of SECONDS of processor time it is interrupted as by Ctrl-C, and
called again in the same process, where it resumes from its newest checkpoint. After the other half it is interrupted
again. Every checkpoint appends a line to FOLDER/watched.jsonl, see `Watch.look`.
"""

import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path

import torch

from reliability.record import resident_bytes
from rsa_hf.tasks import language_modeling
from rsa_hf.tasks.text_data import LanguageModelingDataConfig, read_texts
from rsa_hf.training.checkpoints import CheckpointFolder
from rsa_hf.training.steps import Stepper

CONFIG = Path(__file__).parents[2] / "configs" / "lm_bytes_embedded.yaml"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
YARDSTICK_EVERY = 10  # steps
ENDLESS = 10**7  # steps; the clock ends the run


class Yardstick:
    """A fixed piece of work in plain PyTorch. It is the unit of a step's time, which excludes the machine's speed."""

    def __init__(self, block_size):
        self.layer = torch.nn.TransformerEncoderLayer(64, 8, 128, dropout=0.0, batch_first=True)
        self.states = torch.randn(8, block_size, 64)

    def __call__(self):
        for _ in range(3):
            self.layer.zero_grad()
            self.layer(self.states).square().mean().backward()


class Watch:
    """Measure every step, interrupt one of them, and measure the process after every checkpoint."""

    def __init__(self, output, every, block_size):
        self.output = output
        self.times = {name: array("d") for name in ("step seconds", "step in yardsticks")}
        self.yardstick = Yardstick(block_size)
        self.every = every
        self.interrupts_after = None  # seconds, as time.process_time() counts them
        step, save = Stepper.step, CheckpointFolder.save

        def timed_step(stepper, number):
            # Between two checkpoints, so that some steps are lost and repeated.
            is_time = self.interrupts_after is not None and time.process_time() > self.interrupts_after
            if is_time and number % self.every == self.every // 2:
                self.interrupts_after = None
                signal.raise_signal(signal.SIGINT)
            begin = time.process_time()
            taken = step(stepper, number)
            middle = time.process_time()
            self.times["step seconds"].append(middle - begin)
            if number % YARDSTICK_EVERY == 0:
                self.yardstick()  # at once, so that another program slows both
                self.times["step in yardsticks"].append((middle - begin) / (time.process_time() - middle))
            return taken

        def watched_save(folder, progress, *rest):
            save(folder, progress, *rest)
            written = folder.path / f"step-{progress.step}"
            self.look(progress.step, {path.name: path.stat().st_size for path in written.iterdir()})

        Stepper.step, CheckpointFolder.save = timed_step, watched_save

    def look(self, step=None, sizes=None):
        """Record what the process holds, and the processor time of the steps since the last record.

        Args:
            step: the step of the checkpoint that was written, or None without one.
            sizes: the sizes of its files in bytes.
        """
        gc.collect()
        found = {
            "step": step,
            "sizes": sizes,
            "seconds": time.monotonic(),
            "cpu": time.process_time(),
            "rss": resident_bytes(),
            "blocks": sys.getallocatedblocks(),  # Python objects, however small
            "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
            "files": sorted(os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()),
            "threads": len(os.listdir("/proc/self/task")),
            "python threads": sorted(thread.name for thread in threading.enumerate()),
        }
        for name, values in self.times.items():
            if values:
                found[name] = statistics.median(values)
                del values[:]
        with self.output.open("a") as file:
            file.write(json.dumps(found) + "\n")


def main(folder, seconds, every, block_size):
    # The run makes more than two passes over the text, so that it opens the file again.
    texts = read_texts(LanguageModelingDataConfig(max_train_bytes=4 * every * 8 * block_size, max_eval_bytes=20_000))
    for split in ("train", "validation"):
        (folder / f"{split}.txt").write_bytes(texts[split])
    settings = {f"config_overrides.{name}": size for name, size in SIZES.items()}
    settings |= {f"files.{split}": folder / f"{split}.txt" for split in ("train", "validation")}
    settings |= {"source": "files", "streaming": "true", "max_train_bytes": "null", "block_size": block_size}
    settings |= {"batch_size": 8, "eval_every_steps": every, "log_every_steps": every // 10}
    watch = Watch(folder / "watched.jsonl", every, block_size)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores SIGINT

    def train(name, max_steps):
        last = {"output_dir": folder / name, "max_steps": max_steps}
        language_modeling.main([str(CONFIG), *(f"--{key}={value}" for key, value in {**settings, **last}.items())])

    train("warm", 2 * every)
    watch.look()
    for half in (1, 2):
        watch.interrupts_after = time.process_time() + seconds / 2
        with suppress(KeyboardInterrupt):
            train("long", ENDLESS)
        assert watch.interrupts_after is None, f"half {half} ended by itself"
        watch.look()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
