# train.py: 4 workers, 2 on each of 2 nodes
# rendezvous at 10.0.0.1:29500
# note: box1 sends to 10.0.0.2 over wlan0
# copied to every node first: 1005 files, 3 MiB of /home/me/a touch injected (digest ffffffffffffffff)

# --- box1: node rank 0, ranks 0, 1, 10.0.0.1 on ens1f0
# sent first: ~/.multinode/runs/r.0/job.yaml
# not set in the job's environment: PET_*
cd /work &&
env -u RANK \
  PATH=/env/bin:"$PATH" \
  PLAIN=1 \
  ODD='two words; $(touch injected) '"'"'and'"'"' "more"' \
  HF_TOKEN='<redacted>' \
  sh -c 'env; printf '"'"'[%s]'"'"' "$@"; echo' sh 'a b' '*'

# --- box2: node rank 1, ranks 2, 3, box2 on unknown
# assumed: python: the first python3 on PATH
# not set in the job's environment: PET_*
cd /work &&
env -u RANK \
  PATH=/env/bin:"$PATH" \
  PLAIN=1 \
  ODD='two words; $(touch injected) '"'"'and'"'"' "more"' \
  HF_TOKEN='<redacted>' \
  sh -c 'env; printf '"'"'[%s]'"'"' "$@"; echo' sh 'a b' '*'