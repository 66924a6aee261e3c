#!/usr/bin/env bash
# Characters of Shakespeare: nanoGPT's recipe for a CPU (4 layers, 4 heads, 128 features, context 64, batch 12,
# 2,000 steps, no dropout). Its published validation loss is 1.88.
#
#   runs/tinyshakespeare.sh DATA [FOLDER]     DATA has input.txt, which is data/tinyshakespeare/input.txt of
#                                             github.com/karpathy/char-rnn; it is ASCII, so bytes are characters
set -euo pipefail
data="${1:?usage: runs/tinyshakespeare.sh DATA [FOLDER]}"
folder="${2:-runs/tinyshakespeare}"
weft="${WEFT:-$(dirname "$0")/../.venv/bin/weft}"

mkdir -p "$folder"
size=$(wc -c <"$data/input.txt")
train=$((size * 9 / 10))
head -c "$train" "$data/input.txt" >"$folder/train.txt"
tail -c +"$((train + 1))" "$data/input.txt" >"$folder/valid.txt"

SECONDS=0
"$weft" train lm --folder "$folder" --steps 2000 \
  --data.kind text --data.train "$folder/train.txt" --data.valid "$folder/valid.txt" \
  --data.rows 12 --data.length 64 \
  --model.layers 4 --model.heads 4 --model.d_kv 32 --model.d_model 128 --model.d_ff 512 --model.longest 64 \
  --model.norm layer --model.activation gelu_tanh --model.tied true --model.unroll 4 \
  --optimizer.rate 1e-3 --optimizer.warmup 100 --optimizer.last 0.1 \
  --optimizer.beta2 0.99 --optimizer.weight_decay 0.1 --optimizer.clip 1.0 \
  --evaluate.every 500 --save.every 500 --log_every 100
echo "trained in $SECONDS s"
"$weft" eval "$folder"
