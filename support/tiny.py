"""The embedded policies: small enough for any laptop, real enough to learn something.

    python -m support.tiny                        # rebuild tiny_policy/, a minute or so on a CPU
    python -m support.tiny --policy rare_policy   # and the one that is hardly ever right

An ordinary Llama of 282k parameters that reads and writes sums one digit at a time. Reinforcement
can only sharpen what a policy already does now and then, so it first imitates the careless student
of arithmetic.py. That leaves it right about a third of the time, with one flaw that anyone can see
in its text: `4+8=12` where `4+8+1=13` is due. The student of `rare_policy/` forgets 19 of 20
carries: of the sums in which both columns carry (the task "carries") 0.2% come out right.

Rounding differs between builds of torch, so a rebuilt policy is held to `check_gate`, not to bits.
"""

import argparse
import random
from collections import Counter

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewards import TAGS
from support import tasks
from support.arithmetic import careless_solution, error_kind
from support.models import EMBEDDED

TINY_POLICY = EMBEDDED["tiny_policy"]
# Of each: what its student forgets, the sums that it is held to, and how often it gets them right.
STARTS = {
    "tiny_policy": (0.5, "arithmetic", (0.2, 0.45)),
    "rare_policy": (0.95, "carries", (0.0, 0.01)),
}
EOS, UNKNOWN = "<eos>", "<unknown>"
VOCABULARY = [*"0123456789", "+", "=", ",", *TAGS, EOS, UNKNOWN]  # V = 19
MAX_TOKENS = 32  # 6 of the prompt, at most 23 of a well-formed completion, and room for a slip
SEED = 3  # of the shipped policy; seeds 0 to 3 all pass the gate


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, sign and tag; the chat template is the user's message, bare."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("</?think>|</?answer>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # join without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        chat_template="{{ messages[-1]['content'] }}",
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """The untrained policy of 281,600 parameters.

    A Llama: for others (Qwen2 among them) `AutoTokenizer` ignores the tokenizer in the folder and
    makes its own kind from the vocabulary, which would split the tags.
    """
    torch.manual_seed(seed)
    eos = VOCABULARY.index(EOS)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        intermediate_size=256,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        # The usual 0.02 is made for wide models; at this width it learns the sums far later.
        initializer_range=0.08,
        eos_token_id=eos,
        pad_token_id=eos,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def warm_start(seed: int = SEED, forget: float = 0.5) -> LlamaForCausalLM:
    """Imitate a careless student, who forgets this share of carries, on training sums only."""
    steps = 600  # of 64 sums; fewer leave wrong column sums, which later learning mends badly
    model, tokenizer = make_model(seed), make_tokenizer()
    problems = tasks.load_task("arithmetic", "train")
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, (steps - step) / max(1, steps - 50))
    )
    for _ in tqdm(range(steps), desc="warm start"):
        prompts = [problem.prompt for problem in rng.choices(problems, k=64)]
        solutions = [careless_solution(p, rng, forget, invent=0.4 * (1 - forget)) for p in prompts]
        texts = [prompt + solution + EOS for prompt, solution in zip(prompts, solutions)]
        encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        labels[:, : len(prompts[0])] = -100  # the prompt is given, not learned; all have 6 tokens
        optimizer.zero_grad()
        model(**encoded, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def error_breakdown(model: LlamaForCausalLM, task: str = "arithmetic") -> dict[str, float]:
    """The share of each `error_kind` among completions of held-out sums at temperature 1."""
    tokenizer, samples = make_tokenizer(), 2000
    problems = random.Random(0).choices(tasks.load_task(task, "test"), k=samples)
    prompts = [problem.prompt for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt")
    torch.manual_seed(0)
    tokens = model.generate(**inputs, do_sample=True, top_k=0, max_length=MAX_TOKENS)
    texts = tokenizer.batch_decode(tokens[:, len(prompts[0]) :], skip_special_tokens=True)
    kinds = Counter(error_kind(prompt, text) for prompt, text in zip(prompts, texts))
    return {kind: count / samples for kind, count in kinds.most_common()}


def check_gate(breakdown: dict[str, float], policy: str = "tiny_policy") -> None:
    """Raise ValueError unless few column sums are wrong, and as many right as `STARTS` says."""
    share, (_, _, (least, most)) = Counter(breakdown), STARTS[policy]
    if not least <= share["right"] <= most or share["column"] > 0.02:
        raise ValueError(f"this warm start would learn badly, try another seed: {breakdown}")


def main() -> None:
    """Rebuild a policy, hold it to its gate, write its folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", choices=EMBEDDED, default="tiny_policy", help="which one")
    parser.add_argument("--seed", type=int, default=SEED, help="weights and demonstrations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # faster than two at this size, and the same sums in the same order
    forget, task, _ = STARTS[arguments.policy]
    model = warm_start(arguments.seed, forget=forget)
    breakdown = error_breakdown(model, task=task)
    check_gate(breakdown, arguments.policy)
    folder = EMBEDDED[arguments.policy]
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    print(f"wrote {folder}; of held-out completions are {breakdown}")


if __name__ == "__main__":
    main()
