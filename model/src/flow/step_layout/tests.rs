//! Tests of packing a step's arrays.

use super::*;
use crate::flow::{BlockTable, EmbeddingRows, SequencePart, StateSlots};

/// The format of a decoder without recurrent states.
fn axes(axes: usize) -> StepFormat {
    StepFormat { axes, ..StepFormat::TEXT }
}

fn decoding(contexts: &[usize]) -> StepBatch {
    decoding_with(contexts, &[(1..9).collect::<Vec<_>>().into()])
}

fn decoding_with(contexts: &[usize], tables: &[BlockTable]) -> StepBatch {
    let positions: Vec<_> = contexts.iter().map(|context| [[*context as u32, 70, 80]]).collect();
    let parts = contexts.iter().zip(&positions).map(|(context, position)| SequencePart {
        tokens: &[7],
        unseen: None,
        positions: position,
        cached_tokens: *context,
        tables,
        pictures: &[],
        logit_rows: 1,
        repeated: 0,
        scored: 0..0,
        state: None,
    });
    StepBatch::pack(&parts.collect::<Vec<_>>())
}

#[test]
fn arrays_lie_behind_each_other_and_none_over_another() {
    let layout = StepLayout { score_rows: 3, picture_rows: 5, ..StepLayout::decode(33, axes(3), 100) };
    let places: Vec<_> = StepArray::ALL.into_iter().map(|array| layout.place(array)).collect();
    for pair in places.windows(2) {
        assert!(pair[0].end <= pair[1].start && pair[1].start.is_multiple_of(ALIGNMENT), "{places:?}");
    }
    assert_eq!(places.last().map(|tables| tables.end), Some(layout.words()));
    assert_eq!(places.iter().map(Range::len).sum::<usize>(), 33 * 6 + 34 + 33 + 3 + 5 + 5 + 33 * 7);
}

#[test]
fn a_step_fills_its_own_layout_to_the_last_word() {
    let positions: Vec<_> = (14..19).map(|p| [p, p + 100, p + 200]).collect();
    let batch = StepBatch::pack(&[SequencePart {
        tokens: &[1, 2, 3, 4, 5],
        unseen: None,
        positions: &positions,
        cached_tokens: 14,
        tables: &[vec![9, 4].into()],
        pictures: &[EmbeddingRows { tokens: 1..3, cache_rows: &[40, 7] }],
        logit_rows: 1,
        repeated: 0,
        scored: 1..4,
        state: None,
    }]);
    let (layout, mut words) = (StepLayout::of(&batch, axes(3)), vec![u32::MAX; 3]);
    layout.pack(&batch, &mut words);
    assert_eq!(words.len(), layout.words());
    let found = |array| &words[layout.place(array)];
    assert_eq!(found(StepArray::Tokens), batch.tokens.iter().map(|token| token.code()).collect::<Vec<_>>());
    assert_eq!(found(StepArray::Positions), batch.positions);
    assert_eq!(found(StepArray::Slots), batch.slots);
    assert_eq!(found(StepArray::QueryStarts), batch.query_starts);
    assert_eq!(found(StepArray::ContextLengths), batch.context_lengths);
    assert_eq!(found(StepArray::BlockTables), batch.block_tables);
    assert_eq!(found(StepArray::ChosenRows), [batch.logit_rows, batch.score_rows].concat());
    assert_eq!(found(StepArray::EmbeddingRows), batch.picture_rows);
    assert_eq!(found(StepArray::PictureCacheRows), batch.picture_cache_rows);
    assert_eq!(
        StepLayout { format: axes(1), ..layout }.place(StepArray::Positions).len(),
        5,
        "a model with one position axis takes the first axis"
    );
}

#[test]
fn what_a_bucket_has_too_many_rows_is_padding_that_reads_and_writes_nothing() {
    let (batch, layout) = (decoding(&[20, 40]), StepLayout::decode(4, axes(2), 128));
    assert!(layout.takes(&batch));
    let mut words = Vec::new();
    layout.pack(&batch, &mut words);
    let found = |array| &words[layout.place(array)];
    assert_eq!(found(StepArray::Tokens), [7, 7, 0, 0]);
    assert_eq!(found(StepArray::Positions), [20, 40, 0, 0, 70, 70, 0, 0]);
    assert_eq!(found(StepArray::Slots), [2 * 16 + 4, 3 * 16 + 8, NO_SLOT, NO_SLOT]);
    assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4]);
    assert_eq!(found(StepArray::ContextLengths), [21, 41, 0, 0]);
    assert!(found(StepArray::ChosenRows).is_empty(), "all rows are chosen in order, so no list is uploaded");
    let tables = &words[layout.place(StepArray::BlockTables).start..];
    assert_eq!(tables, [1, 2, 0, 0, 0, 0, 0, 0, 1, 2, 3], "the end of the block tables is not uploaded");
    assert!(words.len() < layout.words());
}

/// A decoding sequence that runs `repeated` tokens again and has `logit_rows` rows of logits.
fn verifying<'a>(
    tokens: &'a [u32],
    positions: &'a [[u32; 3]],
    repeated: usize,
    tables: &'a [BlockTable],
    slot: u32,
) -> SequencePart<'a> {
    SequencePart {
        tokens,
        positions,
        cached_tokens: 20,
        tables,
        logit_rows: tokens.len() - repeated,
        repeated,
        state: Some(StateSlots::in_place(slot)),
        ..SequencePart::default()
    }
}

#[test]
fn attention_treats_each_row_of_a_short_sequence_as_a_sequence() {
    let (tables, positions) = ([vec![1, 2].into()], [[20; 3], [21; 3], [22; 3]]);
    let prompt = [BlockTable::from(vec![3])];
    let parts = [
        verifying(&[7, 8, 9], &positions, 1, &tables, 4),
        verifying(&[6], &positions[..1], 0, &tables, 5),
        SequencePart {
            cached_tokens: 0,
            logit_rows: 0,
            tables: &prompt,
            ..verifying(&[1, 2], &positions[..2], 0, &tables, 6)
        },
    ];
    let format = StepFormat { has_states: true, ..axes(1) };
    let batch = StepBatch::pack(&parts[..2]);
    let (layout, mut words) = (StepLayout::of(&batch, format), Vec::new());
    assert_eq!((layout.sequences, layout.single_rows, layout.has_linked_rows), (4, 4, true));
    assert_eq!(layout.states, StateCounts { sequences: 2, single_rows: 0, short: 2 });
    layout.pack(&batch, &mut words);
    let found = |array| &words[layout.place(array)];
    assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4]);
    assert_eq!(found(StepArray::ContextLengths), [21, 22, 23, 21]);
    assert_eq!(found(StepArray::BlockTables), [1, 2, 1, 2, 1, 2, 1, 2]);
    assert_eq!((found(StepArray::StateStarts), found(StepArray::StateContexts)), (&[0, 3, 4][..], &[23, 21][..]));
    assert_eq!(found(StepArray::ChosenRows), [1, 2, 3]);

    // In a step with a prompt, the tables are not repeated, so that they need no more memory.
    let batch = StepBatch::pack(&parts);
    let layout = StepLayout::of(&batch, format);
    assert_eq!((layout.sequences, layout.single_rows, layout.has_linked_rows), (3, 0, false));
    layout.pack(&batch, &mut words);
    assert_eq!(words[layout.place(StepArray::BlockTables)], [1, 2, 1, 2, 3, 0]);
    assert!(!StepLayout::verify(8, 8, format, 32).takes(&batch), "the step has a prompt");
}

#[test]
fn a_padded_step_verifies_drafts_of_sequences_with_states() {
    let (tables, positions) = ([vec![1, 2].into()], [[20; 3], [21; 3], [22; 3]]);
    let batch = StepBatch::pack(&[
        verifying(&[6], &positions[..1], 0, &tables, 5),
        verifying(&[7, 8, 9], &positions, 1, &tables, 4),
    ]);
    let format = StepFormat { has_states: true, ..axes(1) };
    assert!(!StepLayout::decode(8, format, 32).takes(&batch), "a state is updated by several rows");
    assert!(!StepLayout::verify(8, 2, format, 32).takes(&batch), "the step has three rows of logits");
    let layout = StepLayout::verify(8, 5, format, 32);
    assert!(layout.takes(&batch));
    assert!(!layout.with_drafts(true).takes(&batch), "the batch has no inputs of a draft head");
    let mut words = Vec::new();
    layout.pack(&batch, &mut words);
    let found = |array| &words[layout.place(array)];
    assert_eq!(found(StepArray::QueryStarts), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(found(StepArray::ContextLengths), [21, 21, 22, 23, 0, 0, 0, 0]);
    assert_eq!(found(StepArray::StateStarts), [0, 1, 4, 8, 8, 8, 8, 8, 8]);
    assert_eq!(found(StepArray::StateContexts), [21, 23, 0, 0, 0, 0, 0, 0]);
    assert_eq!(found(StepArray::StateWrites)[..3], [5, 4, NO_STATE]);
    assert_eq!(found(StepArray::ChosenRows), [0, 2, 3, 0, 0]);
    let single = StepLayout::decode(4, format, 32);
    single.pack(&StepBatch::pack(&[verifying(&[6], &positions[..1], 0, &tables, 5)]), &mut words);
    assert_eq!(words[single.place(StepArray::StateStarts)], [0, 1, 2, 3, 4], "each row of padding is a sequence");
}

#[test]
fn each_cache_group_has_padded_slots_and_tables() {
    let tables = [vec![1, 2].into(), BlockTable { skipped: 1, blocks: vec![5] }];
    let format = StepFormat { groups: 2, full_groups: 2, ..axes(1) };
    let (batch, layout) = (decoding_with(&[20, 30], &tables), StepLayout::decode(3, format, 48));
    let mut words = Vec::new();
    layout.pack(&batch, &mut words);
    let slots = [2 * 16 + 4, 2 * 16 + 14, NO_SLOT, 5 * 16 + 4, 5 * 16 + 14, NO_SLOT];
    assert_eq!(words[layout.place(StepArray::Slots)], slots);
    let tables = &words[layout.place(StepArray::BlockTables).start..];
    assert_eq!(tables, [1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 5, 0, 0, 5], "the last row of each group is padding");
}

#[test]
fn block_numbers_are_scaled_per_group() {
    let tables = [vec![1, 2].into(), vec![3, 5].into()];
    let segment_layers = SegmentLayers { full: 4, windowed: 3 };
    let format = StepFormat { groups: 2, segment_layers, ..axes(1) };
    let (batch, mut words) = (decoding_with(&[20], &tables), Vec::new());
    let layout = StepLayout::of(&batch, format);
    layout.pack(&batch, &mut words);
    assert_eq!(words[layout.place(StepArray::Slots)], [8 * 16 + 4, 15 * 16 + 4]);
    assert_eq!(words[layout.place(StepArray::BlockTables)], [4, 8, 9, 15]);
}

#[test]
fn a_step_without_a_sequence_is_all_padding() {
    let (layout, mut words) = (StepLayout::decode(3, axes(1), 64), Vec::new());
    layout.pack(&StepBatch::pack(&[]), &mut words);
    assert_eq!(words[layout.place(StepArray::ContextLengths)], [0, 0, 0]);
    assert_eq!(words[layout.place(StepArray::QueryStarts)], [0, 1, 2, 3]);
}

#[test]
fn a_bucket_takes_decoding_that_fits_and_nothing_else() {
    let layout = StepLayout::decode(2, axes(3), 64);
    assert!(layout.takes(&decoding(&[63])) && layout.takes(&decoding(&[10, 50])));
    assert!(!layout.takes(&decoding(&[64])), "the layout cannot hold a fifth block");
    assert!(!layout.takes(&decoding(&[1, 2, 3])), "the layout cannot hold a third row");
    let changes: [fn(&mut StepBatch); 3] =
        [|batch| batch.score_rows.push(0), |batch| batch.picture_rows.push(0), |batch| batch.logit_rows.clear()];
    for change in changes {
        let mut batch = decoding(&[10, 50]);
        change(&mut batch);
        assert!(!layout.takes(&batch), "{batch:?}");
    }
}

#[test]
fn a_bucket_attends_at_most_to_each_rows_whole_context() {
    let layout = StepLayout::decode(3, axes(1), 100);
    assert_eq!((layout.blocks_max, layout.query_key_pairs), (7, 3 * 7 * 16));
}
