"""Proteins for LCPLM: their tokens, their embeddings, and scores of residues and of variants."""

from brickwork.assemblies.embed_fasta import embed_fasta as embed_fasta
from brickwork.assemblies.embeddings_file import ProteinEmbeddings as ProteinEmbeddings
from brickwork.assemblies.fasta import BadRecord as BadRecord
from brickwork.assemblies.fasta import FastaRecord as FastaRecord
from brickwork.assemblies.fasta import read_fasta as read_fasta
from brickwork.assemblies.masked_residues import masked_log_probs as masked_log_probs
from brickwork.assemblies.protein_embeddings import embed_proteins as embed_proteins
from brickwork.assemblies.protein_embeddings import embed_residues as embed_residues
from brickwork.assemblies.protein_tokens import ALPHABET as ALPHABET
from brickwork.assemblies.protein_tokens import CLS as CLS
from brickwork.assemblies.protein_tokens import EOS as EOS
from brickwork.assemblies.protein_tokens import MASK as MASK
from brickwork.assemblies.protein_tokens import PAD as PAD
from brickwork.assemblies.protein_tokens import RESIDUES as RESIDUES
from brickwork.assemblies.protein_tokens import UNK as UNK
from brickwork.assemblies.protein_tokens import ProteinBatch as ProteinBatch
from brickwork.assemblies.protein_tokens import decode as decode
from brickwork.assemblies.protein_tokens import tokenize as tokenize
from brickwork.assemblies.protein_variants import variant_scores as variant_scores
from brickwork.assemblies.variants_table import score_variants_table as score_variants_table
