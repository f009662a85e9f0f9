//! Stories of the vision cache, and random ones compared with a careful reader of its effects.

use super::*;

fn hash(name: u8) -> PictureHash {
    PictureHash([name; 32])
}

fn picture(name: u8, rows: usize) -> PictureRequest {
    PictureRequest { key: hash(name), rows, patches: rows * 4 }
}

fn rows(rows: &[u32]) -> Arc<[u32]> {
    rows.into()
}

#[test]
fn the_same_picture_twice_in_one_request_is_encoded_once() {
    let mut vision = VisionCore::new(10, 100);
    let effects = vision.step(Input::Want(Ticket(1), vec![picture(1, 3), picture(1, 3)]));
    assert_eq!(effects, [Effect::Launch(vec![(hash(1), rows(&[0, 1, 2]))])]);
    assert_eq!(vision.step(Input::Encoded), [Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2]); 2])]);
    vision.step(Input::Unpin(vec![hash(1), hash(1)]));
    assert_eq!(vision.counts(), (7, 1), "it stays cached though nobody holds it");
}

#[test]
fn only_fully_cached_pictures_are_recalled_and_pinned() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 4), picture(2, 3)]));
    assert_eq!(vision.recall(&[hash(1)]), None, "it is not encoded yet");
    vision.step(Input::Encoded);
    vision.step(Input::Unpin(vec![hash(1), hash(2)]));
    assert_eq!(vision.recall(&[hash(1), hash(3)]), None);
    assert_eq!(vision.recall(&[hash(1), hash(1)]), Some(vec![rows(&[0, 1, 2, 3]); 2]));
    // The second makes room for the new one. The recalled one does not, although it was needed first.
    vision.step(Input::Want(Ticket(2), vec![picture(4, 6)]));
    assert!(vision.holds(&hash(1)) && !vision.holds(&hash(2)));
    vision.step(Input::Encoded);
    vision.step(Input::Unpin(vec![hash(1)]));
    assert_eq!(vision.step(Input::Want(Ticket(3), vec![picture(5, 4)])), [], "one of its two pins is left");
    vision.step(Input::Unpin(vec![hash(1)]));
    assert!(!vision.holds(&hash(1)));
}

#[test]
fn a_constantly_used_picture_makes_room_for_a_waiting_one() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    assert_eq!(vision.step(Input::Want(Ticket(2), vec![picture(2, 8)])), [], "the first is held");
    // Another recall would keep it pinned.
    assert_eq!(vision.recall(&[hash(1)]), None, "whoever comes now waits behind the second");
    vision.step(Input::Want(Ticket(3), vec![picture(1, 4)]));
    let effects = vision.step(Input::Unpin(vec![hash(1)]));
    assert!(matches!(&effects[..], [Effect::Launch(pictures)] if pictures[0].0 == hash(2)), "{effects:?}");
}

#[test]
fn two_requests_for_one_picture_share_the_launch() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 3)]));
    assert_eq!(vision.step(Input::Want(Ticket(2), vec![picture(1, 3)])), []);
    assert!(!vision.needs_pixels(&hash(1)), "the launch under way has them");
    let effects = vision.step(Input::Encoded);
    assert_eq!(
        effects,
        [Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2])]), Effect::Ready(Ticket(2), vec![rows(&[0, 1, 2])])]
    );
}

#[test]
fn a_request_waits_for_all_rows_and_evicts_longest_unused_pictures() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    vision.step(Input::Want(Ticket(2), vec![picture(2, 4)]));
    vision.step(Input::Encoded);
    assert_eq!(vision.step(Input::Want(Ticket(3), vec![picture(3, 5)])), [], "both are still pinned");
    vision.step(Input::Unpin(vec![hash(2)]));
    assert_eq!(vision.counts(), (1, 2), "the second made room for the third, the first is pinned");
    vision.step(Input::Encoded);
    assert_eq!(
        vision.step(Input::Want(Ticket(4), vec![picture(4, 11)])),
        [Effect::Refused { ticket: Ticket(4), rows: 11, limit: 10 }]
    );
}

#[test]
fn pictures_make_room_in_the_order_of_release_and_only_as_needed() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 4), picture(2, 4)]));
    assert_eq!(vision.patches_under_way(), 32);
    vision.step(Input::Encoded);
    assert_eq!(vision.patches_under_way(), 0);
    vision.step(Input::Unpin(vec![hash(2)]));
    vision.step(Input::Unpin(vec![hash(1)]));
    vision.step(Input::Want(Ticket(2), vec![picture(3, 6)]));
    let held = [1, 2, 3].map(|name| vision.holds(&hash(name)));
    assert_eq!(held, [true, false, true], "two free rows and four of the one released first are enough");
}

#[test]
fn a_launch_never_takes_more_patches_than_there_are_permits() {
    let mut vision = VisionCore::new(100, 40);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 5)]));
    vision.step(Input::Want(Ticket(2), vec![picture(2, 6)]));
    let effects = vision.step(Input::Want(Ticket(3), vec![picture(3, 5)]));
    let Some(Effect::Launch(pictures)) = effects.last() else { panic!("{effects:?}") };
    let keys: Vec<u8> = pictures.iter().map(|(key, _)| key.0[0]).collect();
    assert_eq!(keys, [2], "24 + 20 patches are more than a launch takes: the third waits");
    vision.step(Input::Want(Ticket(4), vec![picture(4, 6)]));
    let effects = vision.step(Input::Encoded);
    let Some(Effect::Launch(pictures)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(pictures.len(), 1, "nor do 20 + 24");
}

#[test]
fn only_a_full_launch_is_begun_behind_a_running_one() {
    let mut vision = VisionCore::new(100, 40);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 5)]));
    assert_eq!(vision.step(Input::Want(Ticket(2), vec![picture(2, 6)])), [], "what comes next may fill it");
    let names = |effects: &[Effect]| match effects {
        [.., Effect::Launch(pictures)] => pictures.iter().map(|(key, _)| key.0[0]).collect(),
        effects => panic!("{effects:?}"),
    };
    let begun: Vec<u8> = names(&vision.step(Input::Want(Ticket(3), vec![picture(3, 4)])));
    assert_eq!(begun, [2, 3], "24 + 16 patches are a whole launch");
    assert_eq!(vision.step(Input::Want(Ticket(4), vec![picture(4, 10)])), [], "two are under way");
    assert!(!vision.needs_pixels(&hash(3)) && vision.needs_pixels(&hash(4)), "only the fourth waits");
    let effects = vision.step(Input::Encoded);
    assert_eq!(effects[0], Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2, 3, 4])]), "launches end in their order");
    assert_eq!(names(&effects), [4]);
    let effects = vision.step(Input::Encoded);
    assert!(matches!(effects[..], [Effect::Ready(Ticket(2), _), Effect::Ready(Ticket(3), _)]), "{effects:?}");
}

#[test]
fn an_abandoned_request_makes_room_wherever_it_waits() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 8)]));
    vision.step(Input::Want(Ticket(2), vec![picture(2, 5)]));
    vision.step(Input::Want(Ticket(3), vec![picture(3, 2)]));
    // It waits for rows. The request after it gets them now.
    assert_eq!(vision.step(Input::Withdraw(Ticket(2))), []);
    assert!(!vision.needs_pixels(&hash(2)) && vision.counts() == (0, 2));
    // It waits for its launch, which continues. Its rows are free for others afterwards.
    assert_eq!(vision.step(Input::Withdraw(Ticket(1))), []);
    assert_eq!(vision.step(Input::Encoded), [Effect::Launch(vec![(hash(3), rows(&[8, 9]))])]);
    assert_eq!(vision.step(Input::Want(Ticket(4), vec![picture(4, 7)])), [], "the launch is under way");
    assert_eq!(vision.counts(), (1, 2), "the first made room for the fourth");
    assert_eq!(vision.step(Input::Withdraw(Ticket(9))), [], "a stranger is nobody's loss");
}

#[test]
fn no_request_overtakes_one_waiting_for_rows() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 8)]));
    assert_eq!(vision.step(Input::Want(Ticket(2), vec![picture(2, 5)])), []);
    assert_eq!(vision.step(Input::Want(Ticket(3), vec![picture(3, 1)])), [], "though it would fit");
}

#[test]
fn a_waiting_request_needs_pixels_even_if_its_picture_is_cached() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(Input::Want(Ticket(1), vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    vision.step(Input::Want(Ticket(2), vec![picture(2, 6)]));
    vision.step(Input::Encoded);
    // The third needs all rows, so the fourth waits, although its picture is cached.
    vision.step(Input::Want(Ticket(3), vec![picture(3, 10)]));
    vision.step(Input::Want(Ticket(4), vec![picture(1, 4)]));
    assert!(vision.needs_pixels(&hash(1)), "it will have made room by then");
    vision.step(Input::Unpin(vec![hash(1)]));
    vision.step(Input::Unpin(vec![hash(2)]));
    vision.step(Input::Encoded);
    assert!(vision.needs_pixels(&hash(1)));
    let effects = vision.step(Input::Unpin(vec![hash(3)]));
    assert!(matches!(&effects[..], [Effect::Launch(pictures)] if pictures[0].0 == hash(1)), "{effects:?}");
}

/// Pictures of a request, and their rows.
type Held = (Vec<PictureHash>, Vec<Arc<[u32]>>);

#[derive(Clone, Debug)]
enum Event {
    Want(Vec<u8>),
    Encoded,
    /// The holder with this number releases its pictures.
    Unpin(usize),
    /// The waiting request with this number gives up.
    Withdraw(usize),
}

fn event() -> impl proptest::strategy::Strategy<Value = Event> {
    use proptest::prelude::*;
    prop_oneof![
        proptest::collection::vec(1u8..8, 1..4).prop_map(Event::Want),
        Just(Event::Encoded),
        (0usize..50).prop_map(Event::Unpin),
        (0usize..50).prop_map(Event::Withdraw),
    ]
}

proptest::proptest! {
    /// Compared with a careful reader of the effects. Rows of live pictures never overlap. A launch keeps to its
    /// permits and finds its pixels. Each ticket is answered once, and when all holders release, all are answered.
    #[test]
    fn pictures_never_share_rows_and_no_request_starves(
        events in proptest::collection::vec(event(), 1..120),
        cache_rows in 7usize..20,
        permits in 7usize..20,
    ) {
        let mut vision = VisionCore::new(cache_rows, permits * 4);
        let mut open: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        let mut held: Vec<Held> = Vec::new();
        let mut launched: VecDeque<Vec<(PictureHash, Arc<[u32]>)>> = VecDeque::new();
        let mut contents: Vec<Option<PictureHash>> = vec![None; cache_rows];
        let mut pixels: Vec<PictureHash> = Vec::new();
        let mut next = 0;
        // At the end all holders release and every launch ends.
        let ending = (0..400).map(|index| if index % 2 == 0 { Event::Encoded } else { Event::Unpin(0) });
        for event in events.into_iter().chain(ending) {
            let effects = match event {
                Event::Want(names) => {
                    next += 1;
                    let wanted: Vec<_> = names.iter().map(|name| picture(*name, usize::from(*name))).collect();
                    pixels.extend(wanted.iter().map(|picture| picture.key));
                    open.insert(next, names);
                    vision.step(Input::Want(Ticket(next), wanted))
                }
                Event::Encoded => match launched.pop_front() {
                    None => continue,
                    Some(pictures) => {
                        for (key, rows) in pictures {
                            rows.iter().for_each(|row| contents[*row as usize] = Some(key));
                        }
                        vision.step(Input::Encoded)
                    }
                },
                Event::Withdraw(_) if open.is_empty() => continue,
                Event::Withdraw(which) => {
                    let ticket = *open.keys().nth(which % open.len()).expect("not empty");
                    open.remove(&ticket);
                    vision.step(Input::Withdraw(Ticket(ticket)))
                }
                Event::Unpin(_) if held.is_empty() => continue,
                Event::Unpin(which) => {
                    let (keys, _) = held.remove(which % held.len());
                    vision.step(Input::Unpin(keys))
                }
            };
            for effect in effects {
                match effect {
                    Effect::Launch(pictures) => {
                        proptest::prop_assert!(launched.len() < LAUNCHES, "{} launches under way", launched.len());
                        let patches: usize = pictures.iter().map(|(_, rows)| rows.len() * 4).sum();
                        proptest::prop_assert!(patches <= permits * 4);
                        for (key, rows) in &pictures {
                            proptest::prop_assert!(pixels.contains(key), "pixels went before their launch");
                            let read = |row: &u32| held.iter().any(|(_, rows)| rows.iter().any(|r| r.contains(row)));
                            proptest::prop_assert!(!rows.iter().any(read), "a row that is read is written");
                        }
                        launched.push_back(pictures);
                    }
                    Effect::Ready(ticket, rows) => {
                        let names = open.remove(&ticket.0).expect("answered once");
                        for (name, rows) in names.iter().zip(&rows) {
                            proptest::prop_assert_eq!(rows.len(), usize::from(*name));
                            let holds = rows.iter().all(|row| contents[*row as usize] == Some(hash(*name)));
                            proptest::prop_assert!(holds, "the rows hold the picture");
                        }
                        held.push((names.iter().map(|name| hash(*name)).collect(), rows));
                    }
                    Effect::Refused { ticket, rows, limit } => {
                        let names = open.remove(&ticket.0).expect("answered once");
                        let too_large = names.iter().any(|name| usize::from(*name) > permits);
                        proptest::prop_assert!(rows > limit || too_large);
                    }
                }
            }
            pixels.retain(|key| vision.needs_pixels(key));
        }
        proptest::prop_assert!(open.is_empty(), "these still wait: {:?}", open);
        proptest::prop_assert!(held.is_empty() && pixels.is_empty());
    }
}
