"""Durable checkpoints: commits written to a directory or URL, from which a later job goes on.

::

    <checkpoint>/
      attempt-000002-5d0c9a1e              the claim of the present run (its second attempt)
      000002-000003-000000420/             a checkpoint: attempt, generation, index of the commit
        tree.json tensors.safetensors objects.pickle
        manifest.json                      written last: lengths and SHA-256 of the others

``naming`` decides what counts and what goes, ``directory`` reads and writes, ``content`` turns snapshots into files and
back, by ``tree`` and ``tensors``, ``writer`` does so on a thread beside training. What earlier releases wrote is read for ever
(``first_format``), and no file names a module of ours; docs/formats.md describes the files.
"""
