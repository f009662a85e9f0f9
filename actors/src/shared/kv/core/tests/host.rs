//! Tests of blocks that are copied to host memory and back.

use std::collections::VecDeque;

use super::*;

fn copy(block: u32, slot: u32) -> BlockCopy {
    BlockCopy { block, slot }
}

fn blocks(to_host: Vec<BlockCopy>, to_device: Vec<BlockCopy>) -> Copies {
    Copies { blocks: CopyLists { to_host, to_device }, ..Copies::default() }
}

/// Three blocks on the device. Two of them held content computed by A, which B has displaced.
fn pushed_out() -> KvCore {
    let mut kv = KvCore::new(3).with_host(4);
    kv.allot(&[demand(A, 0, 33)]);
    fill(&mut kv, A, 7, 33);
    kv.release(A);
    kv.allot(&[demand(B, 0, 48)]);
    kv
}

#[test]
fn evicted_content_is_copied_to_the_host_exactly_once() {
    let mut kv = pushed_out();
    assert_eq!(kv.take_leaving().blocks.to_host, [copy(0, 0), copy(1, 1)]);
    assert_eq!((kv.take_leaving().blocks.to_host, kv.host_blocks()), (Vec::new(), 2));
    kv.release(B);
    let fetched = kv.fetch(A, &keys(7, 32)).expect("the host holds both blocks");
    assert_eq!(fetched, blocks(vec![], vec![copy(0, 0), copy(1, 1)]));
    kv.fetched(A);
    kv.release(A);
    kv.allot(&[demand(B, 0, 48)]);
    assert_eq!(kv.take_leaving().blocks.to_host, [], "the host holds the blocks already");
}

#[test]
fn a_partly_swapped_prefix_is_shared_after_its_fetch() {
    let mut kv = KvCore::new(4).with_host(4);
    kv.allot(&[demand(A, 0, 64)]);
    fill(&mut kv, A, 7, 64);
    kv.release(A);
    kv.allot(&[demand(B, 0, 32)]);
    kv.take_leaving();
    kv.release(B);
    let prefix = keys(7, 64);
    assert_eq!(kv.beginning(&prefix), Beginning { blocks: 4, resident: 2, missing: 2, lacks_state: false, fits: true });
    assert!(kv.fetch(A, &prefix).is_some());
    assert!(kv.is_coming(&prefix) && !kv.is_coming(&prefix[..2]), "another request waits for the blocks being fetched");
    assert_eq!(kv.allot(&[alike(B, 7, 33, 1)]).short_by, 1, "B cannot use blocks being fetched, and no block is free");
    kv.fetched(A);
    assert_eq!(kv.usage(), KvUse { blocks: 4, held: 4, cached: 0 });
    assert_eq!(kv.allot(&[BlockRequest { more: 0, ..alike(B, 7, 64, 0) }]).tables[0].held, 48);
}

#[test]
fn a_fetch_without_free_blocks_changes_nothing() {
    let mut kv = pushed_out();
    kv.take_leaving();
    assert_eq!(kv.fetch(A, &keys(7, 32)), None, "B holds all blocks");
    assert_eq!(kv.fetch(A, &keys(8, 32)), None, "no sequence has computed this prefix");
    kv.release(B);
    assert!(!kv.has_table(A) && kv.free_blocks() == 3);
}

#[test]
fn blocks_evicted_by_a_fetch_never_overwrite_the_fetched_slots() {
    let mut kv = KvCore::new(2).with_host(2);
    for (sequence, name) in [(A, 7), (B, 8)] {
        kv.allot(&[demand(sequence, 0, 32)]);
        kv.take_leaving();
        fill(&mut kv, sequence, name, 32);
        kv.release(sequence);
    }
    let fetched = kv.fetch(A, &keys(7, 32)).expect("the host holds both blocks");
    assert_eq!(fetched.blocks.to_host, [], "the host has no free slot for the blocks of B");
    assert_eq!(fetched.blocks.to_device.len(), 2);
    kv.fetched(A);
}

#[test]
fn blocks_blanked_ahead_keep_their_content_on_the_host() {
    let mut kv = KvCore::new(4).with_host(8);
    kv.allot(&[demand(A, 0, 64)]);
    fill(&mut kv, A, 7, 64);
    kv.release(A);
    kv.make_blank(2);
    assert_eq!((kv.take_leaving().blocks.to_host, kv.usage().cached), (vec![copy(2, 0), copy(3, 1)], 2));
    kv.allot(&[demand(B, 0, 32)]);
    assert_eq!(kv.take_leaving().blocks.to_host, [], "the blocks were copied to the host already");
    let mut without = KvCore::new(2);
    without.allot(&[demand(A, 0, 32)]);
    fill(&mut without, A, 7, 32);
    without.release(A);
    without.make_blank(2);
    assert_eq!(without.usage().cached, 2, "without a host tier the blocks stay cached on the device");
}

#[test]
fn a_shrink_forgets_removed_blocks_that_were_not_copied_out() {
    let mut kv = pushed_out();
    kv.shrink(1);
    assert_eq!(kv.take_leaving().blocks.to_host, [copy(0, 0)]);
    assert_eq!(
        kv.beginning(&keys(7, 32)),
        Beginning { blocks: 1, resident: 0, missing: 1, lacks_state: false, fits: true }
    );
}

/// Contents of device and host memory. Copies run at random times, at the latest when they must
/// have ended.
struct Memory {
    /// The content of each block: the cache group, the name, and the block's index in its sequence.
    /// `host` has the same data for each slot.
    device: Vec<Option<(usize, u32, usize)>>,
    host: Vec<Option<(usize, u32, usize)>>,
    copies: VecDeque<(bool, BlockCopy)>,
}

impl Memory {
    fn begin(&mut self, copies: Copies) {
        let CopyLists { to_host, to_device } = copies.blocks;
        self.copies.extend(to_host.into_iter().map(|copy| (true, copy)));
        self.copies.extend(to_device.into_iter().map(|copy| (false, copy)));
    }

    fn run(&mut self, count: usize) {
        for (is_to_host, BlockCopy { block, slot }) in self.copies.drain(..count.min(self.copies.len())) {
            let (block, slot) = (&mut self.device[block as usize], &mut self.host[slot as usize]);
            if is_to_host { *slot = *block } else { *block = *slot }
        }
    }

    /// Runs all copies to the host, which must end before a step begins.
    fn step(&mut self) {
        self.run(self.copies.iter().rposition(|(is_to_host, _)| *is_to_host).map_or(0, |last| last + 1));
    }
}

proptest! {
    /// Compares the pool with a model of memory that makes only the requested copies. A block or
    /// slot with a prefix key has the content that was computed for that key. Blocks that a
    /// sequence is reported to hold have the content of its first tokens. No block has two uses at
    /// once. A listener that receives all events knows all blocks.
    #[test]
    fn blocks_and_host_slots_have_the_content_of_their_keys(
        groups in groups(),
        slots in 1usize..20,
        steps in proptest::collection::vec((0u8..9, 0u64..6, 1usize..90, 0u32..4), 1..150),
    ) {
        let mut kv = KvCore::new(9).with_groups(groups.clone()).with_host(slots);
        let mut memory = Memory { device: vec![None; 9], host: vec![None; slots], copies: VecDeque::new() };
        // The name and the number of tokens of each sequence. `fetching` lists the sequences that
        // wait for copies.
        let mut alive: BTreeMap<u64, (u32, usize)> = BTreeMap::new();
        let mut fetching: VecDeque<u64> = VecDeque::new();
        let mut known = BTreeSet::new();
        for (kind, number, tokens, name) in steps {
            let sequence = SequenceId(number);
            memory.run(tokens % 4);
            match kind {
                0 if !fetching.contains(&number) => {
                    kv.release(sequence);
                    alive.remove(&number);
                }
                1 if fetching.is_empty() => {
                    memory.run(usize::MAX);
                    let to = tokens / 6 + 1;
                    if to < kv.blocks() {
                        let gone = kv.shrink(to);
                        alive.retain(|number, _| !gone.contains(&SequenceId(*number)));
                    } else {
                        kv.grow(to);
                    }
                    memory.device.resize(kv.blocks(), None);
                }
                2 | 3 if !alive.contains_key(&number) => {
                    let prefix = keys(name, tokens - 1);
                    let found = kv.beginning(&prefix);
                    if let Some(copies) = kv.fetch(sequence, &prefix) {
                        prop_assert_eq!(copies.blocks.to_device.len(), found.missing);
                        memory.begin(copies);
                        alive.insert(number, (name, found.blocks * BLOCK_TOKENS));
                        fetching.push_back(number);
                    }
                }
                4 => {
                    if let Some(number) = fetching.pop_front() {
                        memory.run(usize::MAX);
                        kv.fetched(SequenceId(number));
                        let (name, held) = alive[&number];
                        for (group, table) in kv.tables[&SequenceId(number)].iter().enumerate() {
                            prop_assert_eq!(table.end() * BLOCK_TOKENS, held);
                            prop_assert_eq!(table.skipped, groups.first_read(group, held));
                            for (place, block) in (table.skipped..).zip(&table.blocks) {
                                prop_assert_eq!(memory.device[*block as usize], Some((group, name, place)));
                            }
                        }
                    }
                }
                5 => {
                    kv.make_blank(tokens % 6);
                    memory.begin(kv.take_leaving());
                }
                6.. if !fetching.contains(&number) => {
                    let (name, held) = alive.get(&number).copied().unwrap_or((name, 0));
                    let mut wanted = demand(sequence, held.min(tokens), tokens);
                    if !alive.contains_key(&number) {
                        wanted.prefix = keys(name, tokens - 1);
                    }
                    if tokens <= held {
                        continue;
                    }
                    let allotment = kv.allot(&[wanted]);
                    // If no step is launched, the copies to the host are left for later.
                    let Some(table) = allotment.tables.first() else { continue };
                    memory.begin(kv.take_leaving());
                    memory.step();
                    for (group, blocks) in table.blocks.iter().enumerate() {
                        for (place, block) in (blocks.skipped..).zip(&blocks.blocks) {
                            let content = &mut memory.device[*block as usize];
                            if place < table.held / BLOCK_TOKENS {
                                prop_assert_eq!(*content, Some((group, name, place)))
                            } else {
                                *content = Some((group, name, place))
                            }
                        }
                    }
                    alive.insert(number, (name, tokens));
                    fill(&mut kv, sequence, name, tokens);
                    kv.release_skipped(sequence, tokens);
                }
                _ => {}
            }
            prop_assert_eq!(kv.free_blocks() + held_blocks(&kv).len(), kv.blocks());
            apply_events(&mut kv, &mut known);
            let places = (0..4).flat_map(|name| keys(name, 96));
            let comes = |name: &Name| kv.coming.values().flatten().any(|(_, coming)| coming == name);
            let leaves = |name: &Name| kv.leaving.iter().any(|(leaving, _)| leaving == name);
            let is_there = |key: &PrefixKey| {
                let name = Name { group: 0, key: *key };
                groups.full() > 0 && (kv.is_known(&name) || comes(&name) || leaves(&name))
            };
            prop_assert_eq!(&known, &places.filter(is_there).collect(), "a listener knows exactly the cached blocks");
        }
        memory.run(usize::MAX);
        for (number, place) in (0..4).flat_map(|name| (0..6).map(move |place| (name, place))) {
            let key = keys(number, (place + 1) * BLOCK_TOKENS)[place];
            for name in (0..groups.count()).map(|group| Name { group, key }) {
                let is_coming = kv.coming.values().flatten().any(|(_, of)| *of == name);
                if let Some(block) = kv.named.get(&name).filter(|_| !is_coming) {
                    prop_assert_eq!(memory.device[*block as usize], Some((name.group, number, place)));
                }
                let is_leaving = kv.leaving.iter().any(|(of, _)| *of == name);
                if let Some([slot]) = kv.host.slots(&name).filter(|_| !is_leaving) {
                    prop_assert_eq!(memory.host[*slot as usize], Some((name.group, number, place)));
                }
            }
        }
        for number in fetching {
            kv.fetched(SequenceId(number));
        }
        alive.keys().for_each(|number| kv.release(SequenceId(*number)));
        prop_assert_eq!(kv.free_blocks(), kv.blocks());
        prop_assert!(kv.host_blocks() <= slots);
    }
}
