#!/usr/bin/env bash
# English to French on Tatoeba's sentence pairs, within an hour on two cores; BLEU and chrF by sacreBLEU.
#
#   runs/tatoeba.sh DATA [FOLDER]     DATA has fra-eng.zip, from manythings.org/anki
set -euo pipefail
data="${1:?usage: runs/tatoeba.sh DATA [FOLDER]}"
folder="${2:-runs/tatoeba}"
here="$(dirname "$0")"
bin="${BIN:-$here/../.venv/bin}"

mkdir -p "$folder"
"$bin/python" "$here/tatoeba.py" prepare "$data" "$folder"
SECONDS=0
"$bin/weft" train translate --folder "$folder" --steps "${STEPS:-4300}" \
  --data.kind tsv --data.train "$folder/train.tsv" --data.valid "$folder/valid.tsv" \
  --data.tokenizer unigram --data.vocab 4000 --data.rows 32 --data.length 64 \
  --model.layers 3 --model.d_model 192 --model.d_ff 768 --model.heads 6 --model.d_kv 32 \
  --model.positions sinusoid --model.tied true --model.unroll 3 --model.smoothing 0.1 \
  --optimizer.rate 2e-3 --optimizer.warmup 400 --optimizer.last 0.02 --optimizer.beta2 0.98 \
  --optimizer.average 0.998 --optimizer.weight_decay 0.01 \
  --evaluate.every 1000 --save.every 500 --log_every 100
echo "trained in $SECONDS s"
"$bin/python" "$here/tatoeba.py" score "$folder"
