"""The command: ``frugalvit VERB …``. One row per verb; each room holds its own commands and loads only when called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from frugalvit import __version__, console, launchers
from frugalvit.errors import Halted, UserError, nearest
from frugalvit.interrupts import Interrupts


@dataclass(frozen=True)
class Verb:
    """A command: its words, where its configuration and its function live, and one line of help."""

    words: str
    config: str
    function: str
    help: str
    several: bool = False
    """Whether it uses the processes that torchrun or srun has started; only the first stays for the other commands."""


VERBS = [
    Verb(
        "demo",
        "frugalvit.config.compare:DemoConfig",
        "frugalvit.training.demo:demo",
        "a small transformer on embedded images, with and without Drloc: minutes on two cores",
    ),
    Verb("data", "frugalvit.config.inspect:DataConfig", "frugalvit.data.inspect:command", "what is in a dataset"),
    Verb(
        "data pack",
        "frugalvit.config.inspect:PackConfig",
        "frugalvit.data.pack:command",
        "write a dataset as WebDataset shards",
    ),
    Verb(
        "train",
        "frugalvit.config.train:TrainConfig",
        "frugalvit.training.commands:train",
        "train a classifier from scratch or fine-tune one, with Drloc",
        several=True,
    ),
    Verb(
        "pretrain",
        "frugalvit.config.pretrain:PretrainConfig",
        "frugalvit.training.pretrain:pretrain",
        "learn features without labels, by views and regions (EsViT)",
        several=True,
    ),
    Verb(
        "compare",
        "frugalvit.config.compare:CompareConfig",
        "frugalvit.training.compare:compare",
        "two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "replay",
        "frugalvit.config.train:ReplayConfig",
        "frugalvit.training.replay:replay",
        "run a failed step again and name its first bad tensor",
    ),
    Verb(
        "predict",
        "frugalvit.config.train:PredictConfig",
        "frugalvit.training.predict:predict",
        "the classes of images",
    ),
    Verb(
        "look correspond",
        "frugalvit.config.look:CorrespondConfig",
        "frugalvit.report.commands:correspond",
        "which regions of two views match, and how often right",
    ),
    Verb(
        "look attend",
        "frugalvit.config.look:AttendConfig",
        "frugalvit.report.commands:attend",
        "where each head of the last block looks from one place",
    ),
    Verb(
        "look explore",
        "frugalvit.config.look:ExploreConfig",
        "frugalvit.report.commands:explore",
        "one page to click through similarities and attention",
    ),
    Verb(
        "report",
        "frugalvit.config.look:ReportConfig",
        "frugalvit.report.commands:report",
        "one page about one or several runs",
    ),
    Verb(
        "probe knn",
        "frugalvit.config.probe:KnnConfig",
        "frugalvit.probing.commands:knn",
        "votes of the nearest training images on frozen features",
    ),
    Verb(
        "probe linear",
        "frugalvit.config.probe:LinearConfig",
        "frugalvit.probing.commands:linear",
        "a linear classifier on frozen features, by SGD",
    ),
    Verb(
        "probe logistic",
        "frugalvit.config.probe:LogisticConfig",
        "frugalvit.probing.commands:logistic",
        "logistic regression on frozen features, regularisation searched",
    ),
    Verb(
        "probe suite",
        "frugalvit.config.probe:SuiteConfig",
        "frugalvit.probing.suite:suite",
        "the 18 datasets of EsViT's Table 9, as far as they are here",
    ),
    Verb(
        "embed",
        "frugalvit.config.probe:EmbedConfig",
        "frugalvit.probing.embed:embed",
        "features of images in a file; neighbours, what to label next, near duplicates",
    ),
    Verb(
        "bench",
        "frugalvit.config.probe:BenchConfig",
        "frugalvit.probing.bench:bench",
        "parameters, GFLOPs, images/s and memory, relative to ViT-B",
    ),
    Verb(
        "bench step",
        "frugalvit.config.probe:BenchStepConfig",
        "frugalvit.training.stepbench:bench_step",
        "a whole training step: images/s, memory, share of the device's matrix rate",
    ),
    Verb(
        "detect train",
        "frugalvit.config.transfer:DetectConfig",
        "frugalvit.transfer.detect_commands:train",
        "boxes and masks: Mask R-CNN or Cascade Mask R-CNN on any backbone",
        several=True,
    ),
    Verb(
        "detect compare",
        "frugalvit.config.transfer:DetectCompareConfig",
        "frugalvit.transfer.comparing:detect",
        "detectors under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "detect eval",
        "frugalvit.config.transfer:DetectEvalConfig",
        "frugalvit.transfer.detect_commands:evaluate",
        "COCO AP of a trained detector",
    ),
    Verb(
        "detect predict",
        "frugalvit.config.transfer:DetectPredictConfig",
        "frugalvit.transfer.detect_commands:predict",
        "objects in images, as pictures and COCO JSON",
    ),
    Verb(
        "segment train",
        "frugalvit.config.transfer:SegmentConfig",
        "frugalvit.transfer.segment_commands:train",
        "a class for every pixel: UperNet on any backbone",
        several=True,
    ),
    Verb(
        "segment compare",
        "frugalvit.config.transfer:SegmentCompareConfig",
        "frugalvit.transfer.comparing:segment",
        "segmenters under two or more settings over several seeds, with a paired test",
        several=True,
    ),
    Verb(
        "segment eval",
        "frugalvit.config.transfer:SegmentEvalConfig",
        "frugalvit.transfer.segment_commands:evaluate",
        "mIoU of a trained segmenter",
    ),
    Verb(
        "segment predict",
        "frugalvit.config.transfer:SegmentPredictConfig",
        "frugalvit.transfer.segment_commands:predict",
        "a class for every pixel of images, as masks and pictures",
    ),
    Verb(
        "export",
        "frugalvit.config.export:ExportConfig",
        "frugalvit.export:export",
        "a model for timm, the Hugging Face hub, ONNX or torch.export, checked",
    ),
    Verb(
        "advise",
        "frugalvit.config.product:AdviseConfig",
        "frugalvit.advise:advise",
        "what to do with a dataset on this machine, why, and how long it takes",
    ),
    Verb(
        "doctor",
        "frugalvit.config.product:DoctorConfig",
        "frugalvit.doctor:doctor",
        "versions, devices, what is missing, what the caches take",
    ),
    Verb(
        "completion",
        "frugalvit.config.product:CompletionConfig",
        "frugalvit.completion:completion",
        "a script that completes commands and options in bash, zsh or fish",
    ),
    Verb(
        "reproduce",
        "frugalvit.config.reproduce:ReproduceConfig",
        "frugalvit.reproduce:reproduce",
        "rerun a table of docs/RESULTS.md",
    ),
    Verb(
        "list models",
        "frugalvit.config.listing:ModelsConfig",
        "frugalvit.listing:models",
        "backbones, with parameters, grid and input size",
    ),
    Verb(
        "list datasets",
        "frugalvit.config.listing:DatasetsConfig",
        "frugalvit.listing:datasets",
        "datasets known by name, and where they stand",
    ),
    Verb(
        "list recipes",
        "frugalvit.config.listing:RecipesConfig",
        "frugalvit.listing:recipes",
        "named settings for train, pretrain, detect and segment",
    ),
]


_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)  # disk full, disk read-only, quota used up


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 when it went well, 2 for a mistake of the user, 1 for a fault of ours, 130 after Ctrl-C.

    A command may end with a status of its own: 3 for a run that a signal ended, saved, so that a scheduler knows that
    there is more to do; 1 where ``doctor`` found problems. With ``--json`` standard output says it too.
    """
    with Interrupts(last=argv is None) as interrupts:
        return _answered(sys.argv[1:] if argv is None else argv, interrupts)


def _answered(words: list[str], interrupts: Interrupts) -> int:
    try:
        return _run(words)
    except launchers.SaidByTheFirst as error:
        if isinstance(error, launchers.MetByAll) and launchers.first_goes_on():
            print(f"frugalvit: process {launchers.rank()}: {shown(str(error))}", file=sys.stderr)
        return 2
    except UserError as error:
        return _fail(words, str(error), 2)
    except Halted:
        return _fail(words, "stopped; the same command goes on.", 3)
    except KeyboardInterrupt:
        return _fail(words, "stopped.", 130)
    except BrokenPipeError:
        # `frugalvit list models | head` closes our output; that is no fault of anybody.
        sys.stderr.close()
        return 0
    except Exception as error:
        if interrupts.came:
            return _fail(words, "stopped.", 130)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = f": {error.filename}" if error.filename else ""
            return _fail(words, f"{error.strerror}{where}. What was written before is intact.", 2)
        if _no_memory(error):
            way = "Use fewer images at once (--batch), a smaller --img-size or a smaller model."
            return _fail(words, f"There is not enough memory for this. {way}", 2)
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
        return _fail(words, "this is a fault of frugalvit, not yours; please report the lines above.", 1, fault)


def _fail(words: list[str], message: str, status: int, fault: str | None = None) -> int:
    """Say why a command ended, to people, and where ``--json`` was given to programs.

    fault: for programs, which have no lines above
    """
    console.complain(shown(message))
    if "--json" in words and launchers.speaks() and not console.is_secondary():
        with contextlib.suppress(OSError):  # nobody reads it
            console.print_json({"error": shown(fault or message), "status": status})
    return status


def _no_memory(error: Exception) -> bool:
    """Whether the machine or its device had no room for what was asked."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from frugalvit.training.faults import is_out_of_memory

    return is_out_of_memory(error)


def shown(message: str) -> str:
    """A message as the one line that is printed."""
    return console.printable(" ".join(message.split()))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"frugalvit {__version__}")
        return 0
    with launchers.said_once():
        verb = find_verb(words)
    if verb is None:
        print(overview(words[0]))
        return 0
    if not verb.several and not _does_it_alone(verb):
        return 0
    from frugalvit import arguments

    rest = words[len(verb.words.split()) :]
    try:
        with launchers.said_once():
            config, common = arguments.parse(_load(verb.config), rest, f"frugalvit {verb.words}", verb.help)
    except SystemExit:  # argparse printed --help
        return 0
    console.set_quiet(common.quiet)
    with console.Waiting(f"frugalvit {verb.words}"):
        result = _load(verb.function)(config)
    if console.is_secondary():  # of several processes only the first answers
        return 0
    status = int(result.data.get("exit", 0))
    if common.json:
        stopped = result.data.get("stopped")
        why = {"error": f"{stopped}: saved, not finished", "status": status} if stopped else {}
        console.print_json(why | result.data)
    else:
        console.print_result(result)
    return status


def _does_it_alone(verb: Verb) -> bool:
    """Whether this process shall do what one process does; of several that torchrun or srun has started the first."""
    found = launchers.started()
    if found is None:
        return True
    if found.rank == 0:
        console.warn(f"'frugalvit {verb.words}' uses one process: the other {found.processes - 1} leave at once")
        launchers.alone()
    return found.rank == 0


def find_verb(words: list[str]) -> Verb | None:
    """The verb that ``words`` begin with; None when they name a family of verbs (``probe``) and ask for its help."""
    by_words = {verb.words: verb for verb in VERBS}
    pair = " ".join(words[:2])
    if pair in by_words:
        return by_words[pair]
    if words[0] in by_words:
        return by_words[words[0]]
    family = [verb.words.split()[1] for verb in VERBS if verb.words.startswith(words[0] + " ")]
    if family:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            return None
        raise UserError(f"'{words[0]}' wants one of {', '.join(family)}, not '{words[1]}'.{nearest(words[1], family)}")
    heads = dict.fromkeys(verb.words.split()[0] for verb in VERBS)
    raise UserError(f"There is no command '{words[0]}'.{nearest(words[0], heads)} See 'frugalvit --help'.")


def overview(family: str = "") -> str:
    """The help of the whole command, or of one family of verbs."""
    verbs = [verb for verb in VERBS if verb.words.split()[0].startswith(family)]
    width = max(len(verb.words) for verb in verbs) + 2
    lines = [f"  {verb.words.ljust(width)}{verb.help}" for verb in verbs]
    head = [
        f"frugalvit {__version__}: train vision transformers when images, labels or compute are scarce",
        "",
        "usage: frugalvit COMMAND [arguments] [options]",
        "",
    ]
    tail = ["", "'frugalvit COMMAND --help' explains a command; every one takes --config FILE, --json and --quiet."]
    return "\n".join(head + lines + tail)


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
