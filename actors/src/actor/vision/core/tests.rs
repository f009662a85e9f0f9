//! Tests of the vision cache, and random runs compared with a model that follows its effects.

use super::*;
use crate::tenant::Tenant;

fn hash(name: u8) -> PictureHash {
    PictureHash([name; 32])
}

fn picture(name: u8, rows: usize) -> EncodeRequest {
    EncodeRequest { key: hash(name), rows, patches: rows * 4, has_pixels: true }
}

fn held(name: u8, rows: usize) -> EncodeRequest {
    EncodeRequest { has_pixels: false, ..picture(name, rows) }
}

fn want(ticket: u64, pictures: Vec<EncodeRequest>) -> Input {
    Input::Want(Ticket(ticket), Priority::default(), pictures)
}

fn rows(rows: &[u32]) -> Arc<[u32]> {
    rows.into()
}

#[test]
fn the_same_picture_twice_in_one_request_is_encoded_once() {
    let mut vision = VisionCore::new(10, 100);
    let effects = vision.step(want(1, vec![picture(1, 3), picture(1, 3)]));
    assert_eq!(effects, [Effect::Encode(vec![(hash(1), rows(&[0, 1, 2]))])]);
    assert_eq!(vision.step(Input::Encoded), [Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2]); 2])]);
    vision.step(Input::Unpin(vec![hash(1), hash(1)]));
    assert_eq!(vision.counts(), (7, 1), "a picture that no request holds stays cached");
}

#[test]
fn a_recall_pins_pictures_only_if_all_are_cached() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 4), picture(2, 3)]));
    assert_eq!(vision.recall(&[hash(1)]), None, "the picture is not encoded yet");
    vision.step(Input::Encoded);
    vision.step(Input::Unpin(vec![hash(1), hash(2)]));
    assert_eq!(vision.recall(&[hash(1), hash(3)]), None);
    assert_eq!(vision.recall(&[hash(1), hash(1)]), Some(vec![rows(&[0, 1, 2, 3]); 2]));
    // The second picture is evicted for the new picture. The recalled picture stays, although it
    // was unpinned first.
    vision.step(want(2, vec![picture(4, 6)]));
    assert!(vision.holds(&hash(1)) && !vision.holds(&hash(2)));
    vision.step(Input::Encoded);
    vision.step(Input::Unpin(vec![hash(1)]));
    assert_eq!(vision.step(want(3, vec![picture(5, 4)])), [], "one of the two pins is still held");
    vision.step(Input::Unpin(vec![hash(1)]));
    assert!(!vision.holds(&hash(1)));
}

#[test]
fn a_constantly_used_picture_is_evicted_for_a_waiting_request() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    assert_eq!(vision.step(want(2, vec![picture(2, 8)])), [], "the first picture is held");
    // If this recall succeeded, the picture would stay pinned.
    assert_eq!(vision.recall(&[hash(1)]), None, "the recall waits with the other requests");
    for ticket in 3..3 + 32 {
        assert!(
            matches!(vision.step(want(ticket, vec![picture(1, 4)]))[..], [Effect::Ready(..)]),
            "ticket {ticket} passes the waiting request"
        );
        vision.step(Input::Unpin(vec![hash(1)]));
    }
    assert_eq!(vision.step(want(99, vec![picture(1, 4)])), [], "no further request may pass the second");
    let effects = vision.step(Input::Unpin(vec![hash(1)]));
    assert!(matches!(&effects[..], [Effect::Encode(pictures)] if pictures[0].0 == hash(2)), "{effects:?}");
}

#[test]
fn two_requests_for_one_picture_share_the_batch() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 3)]));
    assert_eq!(vision.step(want(2, vec![picture(1, 3)])), []);
    assert!(!vision.need_pixels().contains(&hash(1)), "the running batch already has the pixels");
    let effects = vision.step(Input::Encoded);
    assert_eq!(
        effects,
        [Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2])]), Effect::Ready(Ticket(2), vec![rows(&[0, 1, 2])])]
    );
}

#[test]
fn a_request_waits_for_all_rows_and_evicts_unpinned_pictures() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    vision.step(want(2, vec![picture(2, 4)]));
    vision.step(Input::Encoded);
    assert_eq!(vision.step(want(3, vec![picture(3, 5)])), [], "both pictures are still pinned");
    vision.step(Input::Unpin(vec![hash(2)]));
    assert_eq!(vision.counts(), (1, 2), "the second picture is evicted for the third, because the first is pinned");
    vision.step(Input::Encoded);
    assert_eq!(
        vision.step(want(4, vec![picture(4, 11)])),
        [Effect::Refused(Ticket(4), PicturesTooLarge::Request { rows: 11, limit: 10 })]
    );
    let mut vision = VisionCore::new(100, 10);
    let wide = vision.step(want(1, vec![picture(1, 4)]));
    assert_eq!(wide, [Effect::Refused(Ticket(1), PicturesTooLarge::Picture { patches: 16, limit: 10 })]);
}

#[test]
fn pictures_are_evicted_in_release_order_and_only_as_needed() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 4), picture(2, 4)]));
    assert_eq!(vision.patches_under_way(), 32);
    vision.step(Input::Encoded);
    assert_eq!(vision.patches_under_way(), 0);
    vision.step(Input::Unpin(vec![hash(2)]));
    vision.step(Input::Unpin(vec![hash(1)]));
    vision.step(want(2, vec![picture(3, 6)]));
    let held = [1, 2, 3].map(|name| vision.holds(&hash(name)));
    assert_eq!(held, [true, false, true], "two free rows and the four rows of the first released picture are enough");
}

#[test]
fn a_batch_never_exceeds_its_patch_permits() {
    let mut vision = VisionCore::new(100, 40);
    vision.step(want(1, vec![picture(1, 5)]));
    vision.step(want(2, vec![picture(2, 6)]));
    let effects = vision.step(want(3, vec![picture(3, 5)]));
    let Some(Effect::Encode(pictures)) = effects.last() else { panic!("{effects:?}") };
    let keys: Vec<u8> = pictures.iter().map(|(key, _)| key.0[0]).collect();
    assert_eq!(keys, [2], "24 + 20 patches exceed the limit of 40, so the third picture waits");
    vision.step(want(4, vec![picture(4, 6)]));
    let effects = vision.step(Input::Encoded);
    let Some(Effect::Encode(pictures)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(pictures.len(), 1, "20 + 24 patches exceed the limit too");
}

#[test]
fn only_a_full_batch_is_queued_after_a_running_one() {
    let mut vision = VisionCore::new(100, 40);
    vision.step(want(1, vec![picture(1, 5)]));
    assert_eq!(vision.step(want(2, vec![picture(2, 6)])), [], "a batch that is not full waits for the next picture");
    let names = |effects: &[Effect]| match effects {
        [.., Effect::Encode(pictures)] => pictures.iter().map(|(key, _)| key.0[0]).collect(),
        effects => panic!("{effects:?}"),
    };
    let begun: Vec<u8> = names(&vision.step(want(3, vec![picture(3, 4)])));
    assert_eq!(begun, [2, 3], "24 + 16 patches fill a batch");
    assert_eq!(vision.step(want(4, vec![picture(4, 10)])), [], "two batches are running");
    assert!(
        !vision.need_pixels().contains(&hash(3)) && vision.need_pixels().contains(&hash(4)),
        "only the fourth picture waits"
    );
    let effects = vision.step(Input::Encoded);
    assert_eq!(effects[0], Effect::Ready(Ticket(1), vec![rows(&[0, 1, 2, 3, 4])]), "batches end in order");
    assert_eq!(names(&effects), [4]);
    let effects = vision.step(Input::Encoded);
    assert!(matches!(effects[..], [Effect::Ready(Ticket(2), _), Effect::Ready(Ticket(3), _)]), "{effects:?}");
}

#[test]
fn a_withdrawn_request_frees_its_rows_in_every_state() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 8)]));
    let returns = Priority { had_turn: true, ..Priority::default() };
    vision.step(Input::Want(Ticket(2), returns, vec![picture(2, 5)]));
    vision.step(want(3, vec![picture(3, 2)]));
    // Request 2 waits for rows, and request 3 could not overtake it. Once request 2 is withdrawn,
    // request 3 gets rows.
    assert_eq!(vision.step(Input::Withdraw(Ticket(2))), []);
    assert!(!vision.need_pixels().contains(&hash(2)) && vision.counts() == (0, 2));
    // Request 1 waits for its encoder batch. Withdrawing the request does not stop the batch. When
    // the batch has ended, the rows of request 1 are free for other requests.
    assert_eq!(vision.step(Input::Withdraw(Ticket(1))), []);
    assert_eq!(vision.step(Input::Encoded), [Effect::Encode(vec![(hash(3), rows(&[8, 9]))])]);
    assert_eq!(vision.step(want(4, vec![picture(4, 7)])), [], "the batch is running");
    assert_eq!(vision.counts(), (1, 2), "the first picture is evicted for the fourth");
    assert_eq!(vision.step(Input::Withdraw(Ticket(9))), [], "withdrawing an unknown ticket has no effect");
}

#[test]
fn at_most_32_requests_overtake_one_waiting_for_rows() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 7)]));
    vision.step(Input::Encoded);
    assert_eq!(vision.step(want(2, vec![picture(2, 5)])), [], "only three rows are free");
    assert!(matches!(vision.step(want(3, vec![picture(3, 1)]))[..], [Effect::Encode(_)]), "the third picture fits");
    vision.step(Input::Encoded);
    for ticket in 4..4 + 31 {
        assert!(
            matches!(vision.step(want(ticket, vec![picture(3, 1)]))[..], [Effect::Ready(..)]),
            "ticket {ticket} passes the waiting request"
        );
    }
    assert_eq!(vision.step(want(99, vec![picture(3, 1)])), [], "32 requests have already passed request 2");
    assert_eq!(vision.recall(&[hash(3)]), None, "a recall of a cached picture may not pass request 2 either");
    let effects = vision.step(Input::Unpin(vec![hash(1)]));
    assert!(
        matches!(&effects[..], [Effect::Ready(Ticket(99), _), Effect::Encode(pictures)] if pictures[0].0 == hash(2))
    );
    vision.step(Input::Encoded);
    let returns = Priority { had_turn: true, ..Priority::default() };
    vision.step(Input::Want(Ticket(100), returns, vec![picture(4, 9)]));
    assert_eq!(vision.step(want(101, vec![picture(3, 1)])), [], "no request passes a request that had its turn");
}

fn priority_of(priority: i32, tenant: &str) -> Priority {
    Priority { priority, tenant: Tenant::new(tenant), had_turn: false }
}

/// Ends encoder batches until all requests are answered. Returns the tickets in answer order.
fn answers(vision: &mut VisionCore, started: usize) -> Vec<u64> {
    let (mut batches, mut answers) = (started, Vec::new());
    while batches > 0 {
        batches -= 1;
        for effect in vision.step(Input::Encoded) {
            match effect {
                Effect::Encode(_) => batches += 1,
                Effect::Ready(ticket, _) => answers.push(ticket.0),
                effect => panic!("{effect:?}"),
            }
        }
    }
    answers
}

#[test]
fn urgent_requests_and_other_tenants_overtake_a_backlog_of_pictures() {
    // There are rows for all pictures, and four pictures fill an encoder batch.
    let mut vision = VisionCore::new(2000, 40);
    let mut started = 0;
    let mut ask = |vision: &mut VisionCore, ticket: u64, rank: Priority| {
        let key = PictureHash(std::array::from_fn(|place| (ticket >> (place % 2 * 8)) as u8));
        let pictures = vec![EncodeRequest { key, rows: 2, patches: 10, has_pixels: true }];
        let effects = vision.step(Input::Want(Ticket(ticket), rank, pictures));
        started += effects.iter().filter(|effect| matches!(effect, Effect::Encode(_))).count();
    };
    (1..=500).for_each(|ticket| ask(&mut vision, ticket, priority_of(0, "a")));
    ask(&mut vision, 501, priority_of(0, "b"));
    ask(&mut vision, 502, priority_of(-1, "a"));
    ask(&mut vision, 503, Priority { had_turn: true, ..priority_of(0, "a") });
    (504..=520).for_each(|ticket| ask(&mut vision, ticket, priority_of(1, "c")));
    let answers = answers(&mut vision, started);
    assert_eq!(answers.len(), 520);
    let place = |ticket| answers.iter().position(|answered| *answered == ticket).expect("the ticket was answered");
    // The pictures of requests 501 to 503 are preceded by two running encoder batches, one full
    // batch, at most one picture that is served because it is the oldest, and the other pictures of
    // their own batch.
    let places = [502, 503, 501].map(place);
    assert!(places.iter().all(|place| *place < 3 * 4 + 8), "{places:?}");
    assert!(place(504) > 500 - 100 && place(520) == 519, "the least urgent requests come last: {}", place(504));
}

#[test]
fn tenants_share_batches_by_weight() {
    let weights = TenantWeights::of([("b", 3)]).expect("the weights are valid");
    let mut vision = VisionCore::new(200, 4).with_tenants(weights);
    let mut started = 0;
    for ticket in 0..80 {
        let tenant = if ticket < 40 { "a" } else { "b" };
        let effects = vision.step(Input::Want(Ticket(ticket), priority_of(0, tenant), vec![picture(ticket as u8, 1)]));
        started += effects.iter().filter(|effect| matches!(effect, Effect::Encode(_))).count();
    }
    let of_b = answers(&mut vision, started)[..40].iter().filter(|ticket| **ticket >= 40).count();
    assert!((25..=30).contains(&of_b), "tenant b gets about three quarters of the batches: {of_b} of 40");
}

#[test]
fn a_request_for_cached_pictures_does_not_wait_for_batches() {
    let mut vision = VisionCore::new(100, 40);
    vision.step(want(1, vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    (2..9).for_each(|ticket| _ = vision.step(want(ticket, vec![picture(ticket as u8, 10)])));
    assert!(matches!(vision.step(want(9, vec![picture(1, 4)]))[..], [Effect::Ready(Ticket(9), _)]));
    assert!(vision.recall(&[hash(1)]).is_some(), "no waiting request lacks rows");
    assert!(!vision.holds(&hash(8)), "the last request waits for a batch and may still be passed");
}

#[test]
fn a_waiting_request_needs_pixels_even_if_its_picture_is_cached() {
    let mut vision = VisionCore::new(10, 100);
    vision.step(want(1, vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    vision.step(want(2, vec![picture(2, 6)]));
    vision.step(Input::Encoded);
    // The third request needs all rows and cannot be overtaken, so the fourth one waits, although
    // its picture is cached.
    let returns = Priority { had_turn: true, ..Priority::default() };
    vision.step(Input::Want(Ticket(3), returns, vec![picture(3, 10)]));
    vision.step(want(4, vec![picture(1, 4)]));
    assert!(
        vision.need_pixels().contains(&hash(1)),
        "the cached picture will be evicted before the fourth request runs"
    );
    vision.step(Input::Unpin(vec![hash(1)]));
    vision.step(Input::Unpin(vec![hash(2)]));
    vision.step(Input::Encoded);
    assert!(vision.need_pixels().contains(&hash(1)));
    let effects = vision.step(Input::Unpin(vec![hash(3)]));
    assert!(matches!(&effects[..], [Effect::Encode(pictures)] if pictures[0].0 == hash(1)), "{effects:?}");
}

fn copies(pairs: &[(u32, u32)]) -> Vec<BlockCopy> {
    pairs.iter().map(|&(block, slot)| BlockCopy { block, slot }).collect()
}

/// A cache of 10 rows in which the first picture, of 4 rows, was evicted for the second, of 8 rows.
fn evicted(host_rows: usize) -> (VisionCore, Vec<Effect>) {
    let mut vision = VisionCore::new(10, 100).with_host(host_rows);
    vision.step(want(1, vec![picture(1, 4)]));
    vision.step(Input::Encoded);
    vision.step(Input::Unpin(vec![hash(1)]));
    let effects = vision.step(want(2, vec![picture(2, 8)]));
    (vision, effects)
}

#[test]
fn an_evicted_picture_is_copied_back_without_being_encoded() {
    let (mut vision, effects) = evicted(20);
    let leaves = Effect::Copy { to_host: copies(&[(0, 0), (1, 1), (2, 2), (3, 3)]), to_device: Vec::new() };
    assert_eq!(effects[0], leaves, "the picture is copied out before its rows are overwritten");
    assert!(matches!(&effects[1], Effect::Encode(pictures) if pictures[0].0 == hash(2)), "{effects:?}");
    assert!(vision.holds_all(&[hash(1), hash(2)]) && !vision.holds_all(&[hash(3)]));
    assert_eq!(vision.recall(&[hash(1)]), None);
    assert_eq!(vision.step(want(3, vec![held(1, 4)])), [], "there are no free rows");
    assert!(!vision.need_pixels().contains(&hash(1)));
    vision.step(Input::Copied);
    vision.step(Input::Encoded);
    let effects = vision.step(Input::Unpin(vec![hash(2)]));
    let [Effect::Copy { to_host, to_device }] = &effects[..] else { panic!("{effects:?}") };
    let slots = |copies: &[BlockCopy]| copies.iter().map(|copy| copy.slot).collect::<Vec<_>>();
    assert_eq!(
        (slots(to_host), slots(to_device)),
        ((4..12).collect(), (0..4).collect()),
        "the second picture is evicted"
    );
    assert_eq!(vision.host_rows(), 12, "the first picture keeps its slots on the host");
    let effects = vision.step(Input::Copied);
    assert!(matches!(&effects[..], [Effect::Ready(Ticket(3), rows)] if rows[0].len() == 4), "{effects:?}");
    assert_eq!(vision.take_found(), CacheLookup { pictures: 3, hits: 1, host_hits: 1 });
    vision.step(Input::Unpin(vec![hash(1)]));
    let effects = vision.step(want(4, vec![held(2, 8)]));
    let [Effect::Copy { to_host, to_device }] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(
        (to_host.len(), to_device.len()),
        (0, 8),
        "the first picture is still on the host, so no copy is needed"
    );
}

#[test]
fn a_picture_is_copied_back_while_new_pictures_are_encoded() {
    for of in [picture, held] {
        let (mut vision, _) = evicted(20);
        vision.step(Input::Encoded);
        vision.step(Input::Unpin(vec![hash(2)]));
        let effects = vision.step(want(3, vec![of(1, 4), picture(3, 2)]));
        assert!(matches!(&effects[0], Effect::Copy { to_device, .. } if to_device.len() == 4), "{effects:?}");
        assert!(matches!(&effects[1], Effect::Encode(pictures) if pictures.len() == 1 && pictures[0].0 == hash(3)));
        assert_eq!(vision.step(Input::Encoded), [], "one picture is still being copied");
        vision.step(Input::Copied);
        assert!(matches!(vision.step(Input::Copied)[..], [Effect::Ready(Ticket(3), _)]));
    }
}

#[test]
fn a_lost_picture_without_pixels_is_requested_again() {
    let (mut vision, _) = evicted(4);
    vision.step(want(3, vec![picture(3, 7)]));
    // Request 4 also has another picture, so that the rows left are too few for request 6
    // to overtake request 5.
    vision.step(want(4, vec![picture(7, 3), picture(4, 4)]));
    vision.step(want(5, vec![picture(5, 10)]));
    vision.step(want(6, vec![held(1, 4)]));
    for (names, is_lost) in [(vec![2], false), (vec![3], false), (vec![7, 4], true)] {
        vision.step(Input::Encoded);
        assert!(!vision.need_pixels().contains(&hash(1)));
        let effects = vision.step(Input::Unpin(names.iter().map(|name| hash(*name)).collect()));
        assert_eq!(effects.contains(&Effect::Lost(Ticket(6))), is_lost, "after {names:?}: {effects:?}");
    }
    assert!(vision.holds_all(&[hash(4), hash(5)]), "the fourth picture took the slots on the host");
}

#[test]
fn at_most_four_copies_run_at_once() {
    let mut vision = VisionCore::new(2, 100).with_host(20);
    for name in 1..6 {
        vision.step(want(u64::from(name), vec![picture(name, 2)]));
        vision.step(Input::Encoded);
        vision.step(Input::Unpin(vec![hash(name)]));
    }
    assert_eq!(vision.step(want(6, vec![held(1, 2)])), [], "the request waits for a copy to end");
    assert!(matches!(vision.step(Input::Copied)[..], [Effect::Copy { .. }]));
    for _ in 0..3 {
        assert_eq!(vision.step(Input::Copied), []);
    }
    assert!(matches!(vision.step(Input::Copied)[..], [Effect::Ready(Ticket(6), _)]), "copies end in order");
}

/// Pictures of a request, and their rows.
type Held = (Vec<PictureHash>, Vec<Arc<[u32]>>);

#[derive(Clone, Debug)]
enum Event {
    /// A request for pictures. If the flag is set, all of them are decoded. Otherwise only the
    /// pictures without rows on the device or the host are decoded.
    Want(Vec<u8>, bool, Priority),
    Encoded,
    Copied,
    /// The holder with this number releases its pictures.
    Unpin(usize),
    /// The waiting request with this number is withdrawn.
    Withdraw(usize),
}

fn any_rank() -> impl proptest::strategy::Strategy<Value = Priority> {
    use proptest::prelude::*;
    (-1i32..2, 0usize..3, proptest::bool::weighted(0.1)).prop_map(|(priority, tenant, had_turn)| Priority {
        priority,
        tenant: Tenant::new(["a", "b", "c"][tenant]),
        had_turn,
    })
}

fn event() -> impl proptest::strategy::Strategy<Value = Event> {
    use proptest::prelude::*;
    prop_oneof![
        (proptest::collection::vec(1u8..8, 1..4), any::<bool>(), any_rank())
            .prop_map(|(names, all, rank)| Event::Want(names, all, rank)),
        Just(Event::Encoded),
        Just(Event::Copied),
        (0usize..50).prop_map(Event::Unpin),
        (0usize..50).prop_map(Event::Withdraw),
    ]
}

proptest::proptest! {
    /// Compares the cache with a model that follows its effects. Rows of live pictures never
    /// overlap. An encoder batch stays within its permits and finds the pixels of its pictures.
    /// Rows that are copied have been written, and rows that are read have been filled. Each ticket
    /// is answered once. When all holders release their pictures, all tickets are answered.
    #[test]
    fn pictures_never_share_rows_and_no_request_starves(
        events in proptest::collection::vec(event(), 1..120),
        cache_rows in 7usize..20,
        permits in 5usize..20,
        host_rows in proptest::prop_oneof![proptest::strategy::Just(0), 1usize..40],
    ) {
        let mut vision = VisionCore::new(cache_rows, permits * 4).with_host(host_rows);
        let mut on_host: Vec<Option<PictureHash>> = vec![None; host_rows];
        // The content that rows get when copies end.
        let mut copying: VecDeque<Vec<(u32, PictureHash)>> = VecDeque::new();
        let mut open: BTreeMap<u64, (Vec<u8>, Priority)> = BTreeMap::new();
        let mut held: Vec<Held> = Vec::new();
        let mut started: VecDeque<Vec<(PictureHash, Arc<[u32]>)>> = VecDeque::new();
        let mut contents: Vec<Option<PictureHash>> = vec![None; cache_rows];
        let mut pixels: Vec<PictureHash> = Vec::new();
        let mut next = 0;
        // At the end, all holders release their pictures and every encoder batch ends.
        let ending = (0..900).map(|index| [Event::Encoded, Event::Copied, Event::Unpin(0)][index % 3].clone());
        let mut events: VecDeque<Event> = events.into_iter().chain(ending).collect();
        while let Some(event) = events.pop_front() {
            let effects = match event {
                Event::Copied => match copying.pop_front() {
                    None => continue,
                    Some(came) => {
                        came.iter().for_each(|(row, key)| contents[*row as usize] = Some(*key));
                        vision.step(Input::Copied)
                    }
                },
                Event::Want(names, decodes_all, rank) => {
                    next += 1;
                    let wanted = |name: &u8| EncodeRequest {
                        has_pixels: decodes_all || !vision.holds_all(&[hash(*name)]),
                        ..picture(*name, usize::from(*name))
                    };
                    let wanted: Vec<_> = names.iter().map(wanted).collect();
                    pixels.extend(wanted.iter().filter(|picture| picture.has_pixels).map(|picture| picture.key));
                    open.insert(next, (names, rank.clone()));
                    vision.step(Input::Want(Ticket(next), rank, wanted))
                }
                Event::Encoded => match started.pop_front() {
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
                    let ticket = *open.keys().nth(which % open.len()).expect("the list is not empty");
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
                    Effect::Encode(pictures) => {
                        proptest::prop_assert!(started.len() < LAUNCHES, "{} batches under way", started.len());
                        let patches: usize = pictures.iter().map(|(_, rows)| rows.len() * 4).sum();
                        proptest::prop_assert!(patches <= permits * 4);
                        for (key, rows) in &pictures {
                            proptest::prop_assert!(pixels.contains(key), "pixels exist until their batch starts");
                            let read = |row: &u32| held.iter().any(|(_, rows)| rows.iter().any(|r| r.contains(row)));
                            proptest::prop_assert!(!rows.iter().any(read), "no row that is read is overwritten");
                        }
                        let written = pictures.iter().flat_map(|(_, rows)| rows.iter());
                        written.for_each(|row| contents[*row as usize] = None);
                        started.push_back(pictures);
                    }
                    Effect::Copy { to_host, to_device } => {
                        proptest::prop_assert!(copying.len() < COPIES, "{} copies under way", copying.len());
                        for BlockCopy { block, slot } in to_host {
                            let key = contents[block as usize];
                            proptest::prop_assert!(key.is_some(), "a row is copied out only after it was written");
                            on_host[slot as usize] = key;
                        }
                        let mut coming = Vec::new();
                        for BlockCopy { block, slot } in to_device {
                            let is_read = held.iter().any(|(_, rows)| rows.iter().any(|rows| rows.contains(&block)));
                            proptest::prop_assert!(!is_read, "no row that is read is overwritten");
                            contents[block as usize] = None;
                            coming.push((block, on_host[slot as usize].expect("the slot was written before")));
                        }
                        copying.push_back(coming);
                    }
                    Effect::Lost(ticket) => {
                        let (names, rank) = open.remove(&ticket.0).expect("each ticket is answered once");
                        events.push_front(Event::Want(names, true, rank));
                    }
                    Effect::Ready(ticket, rows) => {
                        let (names, _) = open.remove(&ticket.0).expect("each ticket is answered once");
                        for (name, rows) in names.iter().zip(&rows) {
                            proptest::prop_assert_eq!(rows.len(), usize::from(*name));
                            let holds = rows.iter().all(|row| contents[*row as usize] == Some(hash(*name)));
                            proptest::prop_assert!(holds, "the rows hold the requested picture");
                        }
                        held.push((names.iter().map(|name| hash(*name)).collect(), rows));
                    }
                    Effect::Refused(ticket, reason) => {
                        let (names, _) = open.remove(&ticket.0).expect("each ticket is answered once");
                        let sizes: BTreeSet<usize> = names.iter().map(|name| usize::from(*name)).collect();
                        let patches = sizes.last().expect("a request has pictures") * 4;
                        let expected = if patches > permits * 4 {
                            PicturesTooLarge::Picture { patches, limit: permits * 4 }
                        } else {
                            PicturesTooLarge::Request { rows: sizes.iter().sum(), limit: cache_rows }
                        };
                        proptest::prop_assert_eq!(&reason, &expected);
                        proptest::prop_assert!(patches > permits * 4 || sizes.iter().sum::<usize>() > cache_rows);
                    }
                }
            }
            let needed = vision.need_pixels();
            pixels.retain(|key| needed.contains(key));
        }
        proptest::prop_assert!(open.is_empty(), "requests without an answer: {:?}", open);
        proptest::prop_assert!(held.is_empty() && pixels.is_empty());
    }
}
