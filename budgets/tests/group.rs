//! Tests of a group of devices: addresses and memory are provided by all ranks or by none.

use bursar_budgets::testing::HostControl;
use bursar_budgets::testing::Script;
use std::{slice, sync::Arc};

use bursar_budgets::*;

const PAGE: Bytes = Bytes::kib(64);

struct Group {
    ranks: Vec<Arc<HostDevice>>,
    group: DeviceGroup,
}

fn group(pages: &[u64]) -> Group {
    let device = |pages: &u64| Arc::new(HostDevice::new(HostConfig::small(PAGE * *pages)).unwrap());
    let ranks: Vec<_> = pages.iter().map(device).collect();
    let devices = ranks.iter().map(|rank| rank.clone() as Arc<dyn Device>).collect();
    Group { ranks, group: DeviceGroup::of(devices, "host:n").unwrap() }
}

impl Group {
    fn backed(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.counts().backed / PAGE).collect()
    }

    fn reservations(&self) -> Vec<u64> {
        self.ranks.iter().map(|rank| rank.counts().reservations).collect()
    }
}

#[test]
fn each_rank_has_separate_memory() {
    let Group { group, .. } = group(&[4, 4, 4]);
    let start = group.reserve(PAGE * 4).unwrap();
    let other = group.reserve(PAGE * 4).unwrap();
    group.back(start.offset(PAGE), PAGE * 2).unwrap();
    group.back(other, PAGE).unwrap();
    let addresses = group.addresses(start.offset(PAGE));
    assert_eq!(addresses.len(), 3);
    for (rank, address) in addresses.iter().enumerate() {
        // SAFETY: two pages of host memory are backed here, and nothing else uses them.
        let bytes = unsafe { slice::from_raw_parts_mut(address.0 as *mut u8, (PAGE * 2).as_usize()) };
        assert!(bytes.iter().all(|byte| *byte == 0), "memory is zeroed and separate for each rank");
        bytes.fill(rank as u8 + 1);
    }
}

#[test]
fn a_refusal_by_one_rank_leaves_all_ranks_unchanged() {
    for refusing in 0..3 {
        let stage = group(&[4, 4, 4]);
        let start = stage.group.reserve(PAGE * 4).unwrap();
        stage.group.back(start, PAGE).unwrap();
        stage.ranks[refusing].play(Script::new().refuse_back(2));
        let error = stage.group.back(start.offset(PAGE), PAGE).unwrap_err();
        assert!(error.is_refused() && error.hint().is_some(), "{error}");
        assert!(error.to_string().starts_with(&format!("host#{refusing}: the device refused ")), "{error}");
        assert_eq!(stage.backed(), [1, 1, 1], "rank {refusing} refused");
        stage.group.back(start.offset(PAGE), PAGE).unwrap();
        assert_eq!(stage.backed(), [2, 2, 2]);
        stage.ranks[refusing].play(Script::new().refuse_call(5));
        assert!(stage.group.reserve(PAGE).is_err());
        assert_eq!(stage.reservations(), [1, 1, 1], "every rank has released the new addresses");
        stage.group.unback(start, PAGE * 2).unwrap();
        stage.group.release_reservation(start).unwrap();
        assert_eq!((stage.backed(), stage.reservations()), (vec![0; 3], vec![0; 3]));
    }
}

#[test]
fn the_rank_with_the_least_memory_sets_the_groups_memory() {
    let stage = group(&[8, 6]);
    assert_eq!(stage.group.memory().unwrap(), DeviceMemory { total: PAGE * 6, free: PAGE * 6 });
    stage.ranks[0].foreign_takes(PAGE * 5);
    assert_eq!(stage.group.memory().unwrap().free, PAGE * 3);
    let start = stage.group.reserve(PAGE * 6).unwrap();
    assert!(stage.group.back(start, PAGE * 4).unwrap_err().is_refused());
    stage.group.back(start, PAGE * 3).unwrap();
    stage.ranks[1].overhead_grows(PAGE);
    assert_eq!(stage.group.overhead(), PAGE, "overhead of one rank reduces every rank's memory");
}

#[test]
fn overhead_of_one_rank_does_not_hide_drift_of_another() {
    let stage = group(&[8, 8]);
    stage.ranks[0].overhead_grows(PAGE * 3);
    stage.ranks[1].drifts(PAGE * 2);
    let drift = stage.group.process_bytes().unwrap() - stage.group.overhead();
    assert_eq!(drift, PAGE * 2);
}

#[test]
fn a_fence_waits_for_every_rank() {
    let stage = group(&[4, 4]);
    let lane = stage.ranks[1].timeline();
    let ticket = lane.issue();
    let fence = stage.group.fence_here();
    assert!(!fence.is_passed());
    lane.complete(ticket);
    assert!(fence.is_passed());
}

#[test]
fn a_group_with_a_lost_rank_takes_memory_back() {
    let stage = group(&[4, 4]);
    let start = stage.group.reserve(PAGE * 4).unwrap();
    stage.group.back(start, PAGE * 2).unwrap();
    stage.ranks[1].lose("it fell off the bus");
    assert!(stage.group.check().unwrap_err().is_lost());
    assert!(stage.group.back(start.offset(PAGE * 2), PAGE).unwrap_err().is_lost());
    assert_eq!(stage.backed()[0], 2, "the working rank keeps its memory");
    drop(stage.group.unback(start, PAGE * 2));
    drop(stage.group.release_reservation(start));
    assert_eq!((stage.backed()[0], stage.reservations()[0]), (0, 0));
}

#[test]
fn devices_of_different_kinds_cannot_form_a_group() {
    let device = |name: &str| {
        let config = HostConfig { name: name.to_owned(), ..HostConfig::small(PAGE * 4) };
        Arc::new(HostDevice::new(config).unwrap()) as Arc<dyn Device>
    };
    let error = DeviceGroup::of(vec![device("one"), device("two")], "").err().unwrap();
    assert_eq!(error.to_string(), "one and two cannot run one model together");
    assert!(error.hint().is_some());
    let pair = DeviceGroup::of(vec![device("one"), device("one")], "host:2").unwrap();
    assert_eq!((pair.name(), pair.label().as_str(), pair.ranks().len()), ("2 x one", "host:2", 2));
}

/// Segments grow, shrink and drop while ranks refuse calls at random.
#[test]
fn all_ranks_keep_equal_sizes_when_one_rank_refuses_calls() {
    for seed in 0..200_u64 {
        let mut chance = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut below = |limit: u64| {
            chance ^= chance << 13;
            chance ^= chance >> 7;
            chance ^= chance << 17;
            chance % limit
        };
        let stage = group(&[16, 16, 16]);
        for rank in &stage.ranks {
            rank.play((0..6).fold(Script::new(), |script, _| script.refuse_call(1 + below(30))));
        }
        let mut held: Vec<(Address, u64)> = Vec::new();
        for _ in 0..60 {
            match below(3) {
                0 => held.extend(stage.group.reserve(PAGE * 16).map(|address| (address, 0))),
                1 if !held.is_empty() => {
                    let at = below(held.len() as u64) as usize;
                    let (address, pages) = held[at];
                    let more = 1 + below(4);
                    if pages + more <= 16 && stage.group.back(address.offset(PAGE * pages), PAGE * more).is_ok() {
                        held[at].1 += more;
                    }
                }
                _ if !held.is_empty() => {
                    let (address, _) = held.swap_remove(below(held.len() as u64) as usize);
                    stage.group.release_reservation(address).unwrap();
                }
                _ => {}
            }
            let pages: u64 = held.iter().map(|(_, pages)| pages).sum();
            assert_eq!((stage.backed(), stage.reservations()), (vec![pages; 3], vec![held.len() as u64; 3]), "{seed}");
        }
    }
}

#[test]
fn a_host_copy_restores_the_memory_of_each_rank() {
    let Group { group, .. } = group(&[4, 4]);
    let group = Arc::new(group);
    let start = group.reserve(PAGE * 4).unwrap();
    let fill = |of: &dyn Fn(usize) -> u8| {
        for (rank, address) in group.addresses(start).into_iter().enumerate() {
            // SAFETY: two pages of host memory are backed here, and nothing else uses them.
            unsafe { slice::from_raw_parts_mut(address.0 as *mut u8, (PAGE * 2).as_usize()) }.fill(of(rank));
        }
    };
    group.back(start, PAGE * 2).unwrap();
    fill(&|rank| rank as u8 + 1);
    let copy = group.clone().copy_out(start, PAGE * 2).unwrap();
    group.unback(start, PAGE * 2).unwrap();
    let error = group.copy_in(&copy, start).unwrap_err();
    assert!(error.to_string().contains("part of the range is not backed"), "{error}");
    assert!(group.clone().copy_out(start, PAGE * 2).is_err(), "an unbacked range cannot be copied");
    group.back(start, PAGE * 2).unwrap();
    group.copy_in(&copy, start).unwrap();
    for (rank, address) in group.addresses(start).into_iter().enumerate() {
        // SAFETY: two pages of host memory are backed here, and nothing else uses them.
        let bytes = unsafe { slice::from_raw_parts(address.0 as *const u8, (PAGE * 2).as_usize()) };
        assert!(bytes.iter().all(|byte| *byte == rank as u8 + 1), "rank {rank}");
    }
    let of_one = Arc::new(HostDevice::new(HostConfig::small(PAGE)).unwrap());
    let page = of_one.reserve(PAGE).unwrap();
    of_one.back(page, PAGE).unwrap();
    assert!(of_one.copy_in(&copy, page).is_err(), "a copy of two ranks does not fit one device");
}
