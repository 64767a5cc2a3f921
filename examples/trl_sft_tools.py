"""Fine-tuning with TRL on trees: a search over tool calls, trained on what the assistant wrote.

The records are the branches of one depth-first search by an agent with tools (ToolBench, in examples/data): they share
the system prompt, the tools, the question and every call up to where they fork.

    pip install 'trl>=0.20'
    python examples/trl_sft_tools.py [--model HuggingFaceTB/SmolLM2-135M-Instruct] [--steps 20] [--max_tokens 4096]
"""

import argparse
import gzip
import json
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import treewise
from treewise.integrations.sharing import Sharing

DATA = Path(__file__).parent / "data" / "toolbench.jsonl.gz"
# ChatML with tools and tool calls; `generation` marks what is trained.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if loop.first and tools %}{{ '# Tools\n\n' + tools | tojson + '\n\n' }}{% endif -%}
{%- if message.role == 'assistant' -%}{%- generation -%}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}\n</tool_call>' }}
{%- endfor -%}{{ '<|im_end|>\n' }}{%- endgeneration -%}
{%- else -%}{{ (message.content or '') + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""


def branches() -> Dataset:
    records = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]
    # Tools as text: Arrow would give every parameter of one tool to all others, as None.
    return Dataset.from_list(
        [{"messages": record["messages"], "tools": json.dumps(record["tools"])} for record in records]
    )


def main(argv: list[str] | None = None) -> Sharing:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max_length", type=int, default=4096)
    parser.add_argument("--max_tokens", type=int, help="tokens that hold activations at a time, at most")
    parser.add_argument("--output", default="runs/trl_sft_tools")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = TEMPLATE
    trainer = SFTTrainer(
        model=args.model,
        processing_class=tokenizer,
        train_dataset=branches(),
        args=SFTConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            max_length=args.max_length,
            assistant_only_loss=True,
            learning_rate=1e-5,
            logging_steps=1,
            report_to="none",
            use_cpu=args.cpu,
            bf16=not args.cpu,
        ),
    )
    sharing = treewise.share_prefixes(trainer.model, args.max_tokens)
    trainer.train()
    print(sharing)
    return sharing


if __name__ == "__main__":
    main()
