//! Windows: puts arrive, gets return the right bytes, and rights and bounds are enforced.

use std::time::Duration;

use memferry_memory::lookup::{Geometry, LookupConfig, MissPolicy};
use memferry_message::{
    Endpoint, EndpointBuilder, Error, Peer, PutNotification, RemoteWindow, Rights, ShareableBuffer,
    ValidationError, Window, WindowHandle,
};
use memferry_testing::message::{Pair, Random, pair, until, withdraw};
use memferry_testing::pattern::{fill, first_wrong, pattern};

const BYTES: usize = (3 << 20) + 1000;

/// A small cache, so that evictions and misses are frequent.
fn small(policy: MissPolicy) -> EndpointBuilder {
    let mut settings = LookupConfig::cached(Geometry::new(64, 8, 2).unwrap());
    settings.policy = policy;
    settings.high_water_lines = 16;
    settings.sweep_every = 16;
    EndpointBuilder::new().lookup(settings)
}

/// Both kinds of memory, exposed by `there` and attached by `here`.
fn both_kinds(pair: &Pair, rights: Rights, mut test: impl FnMut(&dyn OwnerView, RemoteWindow)) {
    let shareable = pair.there.expose(ShareableBuffer::new(BYTES).unwrap(), rights).unwrap();
    let remote = pair.here.attach(pair.to_there, shareable.handle()).unwrap();
    test(&shareable, remote);
    let ordinary = pair.there.expose(vec![0u8; BYTES], rights).unwrap();
    let remote = pair.here.attach(pair.to_there, ordinary.handle()).unwrap();
    test(&ordinary, remote);
}

/// A window, of any memory.
trait OwnerView {
    fn read(&self, offset: usize, buffer: &mut [u8]);
    fn write(&self, offset: usize, data: &[u8]);
    fn wait(&self, offset: usize, value: u64) -> u64;
    fn load(&self, offset: usize) -> u64;
}

impl<B: Send + 'static> OwnerView for Window<B> {
    fn read(&self, offset: usize, buffer: &mut [u8]) {
        self.read(offset, buffer);
    }

    fn write(&self, offset: usize, data: &[u8]) {
        self.write(offset, data);
    }

    fn wait(&self, offset: usize, value: u64) -> u64 {
        self.wait(offset, None, |seen| seen >= value).unwrap().unwrap()
    }

    fn load(&self, offset: usize) -> u64 {
        self.load(offset)
    }
}

/// Puts and gets of all sizes at all offsets, compared with an ordinary vector.
fn at_random(owned: &dyn OwnerView, remote: &RemoteWindow, rounds: usize) {
    let mut random = Random::new(Random::fresh_seed());
    let mut model = vec![0u8; BYTES];
    owned.write(0, &model);
    for round in 0..rounds {
        let length = match random.below(10) {
            0 => random.below(BYTES as u64 + 1),
            1..=4 => random.below(100_000),
            _ => random.below(300),
        } as usize;
        let offset = random.below((BYTES - length) as u64 + 1) as usize;
        match random.below(4) {
            0 => {
                let data = pattern(length, round as u64);
                remote.put(offset as u64, &data).unwrap();
                model[offset..offset + length].copy_from_slice(&data);
            }
            1 => {
                let data = pattern(length, round as u64);
                model[offset..offset + length].copy_from_slice(&data);
                let put = remote.iput(offset as u64, data).unwrap();
                if random.chance(2) {
                    put.wait().unwrap();
                } else {
                    drop(put);
                    remote.fence().unwrap();
                }
            }
            2 => {
                let mut buffer = vec![0; length];
                remote.get(offset as u64, &mut buffer).unwrap();
                assert_eq!(buffer, model[offset..offset + length], "round {round}");
            }
            _ => {
                let got = remote.iget(offset as u64, vec![0; length]).unwrap().wait().unwrap().1;
                assert_eq!(got, model[offset..offset + length], "round {round}");
            }
        }
    }
    let mut all = vec![0; BYTES];
    owned.read(0, &mut all);
    assert!(all == model);
}

#[test]
fn whatever_is_put_is_got_at_every_size_and_place() {
    let pair = pair(&EndpointBuilder::new());
    both_kinds(&pair, Rights::READ_WRITE, |owned, remote| at_random(owned, &remote, 300));
}

#[test]
fn a_cache_far_too_small_changes_nothing_but_the_time() {
    for policy in [MissPolicy::Wait, MissPolicy::Retry] {
        let pair = pair(&small(policy));
        both_kinds(&pair, Rights::READ_WRITE, |owned, remote| at_random(owned, &remote, 150));
        let counters = pair.here.lookup_counters().unwrap();
        assert!(counters.evictions > 0, "{counters:?}");
    }
}

#[test]
fn nothing_is_looked_up_unless_somebody_asks_for_it() {
    for (builder, is_looked_up) in
        [(EndpointBuilder::new(), false), (small(MissPolicy::Wait), true)]
    {
        let pair = pair(&builder);
        both_kinds(&pair, Rights::READ_WRITE, |owned, remote| at_random(owned, &remote, 20));
        let counters = pair.here.lookup_counters().unwrap();
        let lookups = counters.hits.receive + counters.misses.receive.total();
        assert_eq!(lookups > 0, is_looked_up, "{counters:?}");
    }
}

#[test]
fn many_windows_in_turn_are_all_found() {
    let pair = pair(&EndpointBuilder::new());
    // More than an endpoint remembers, in one region and in none.
    let shared = ShareableBuffer::new(1200 * 64).unwrap();
    let plain = vec![0u8; 1200 * 64];
    let mut windows = Vec::new();
    for number in 0..1200 {
        for start in [shared.as_ptr(), plain.as_ptr()] {
            let at = start.wrapping_add(number * 64).cast_mut();
            // SAFETY: both buffers are dropped after the windows.
            let window = unsafe { pair.there.expose_raw(at, 64, Rights::READ_WRITE) }.unwrap();
            let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
            windows.push((window, remote));
        }
    }
    for round in 0..2u64 {
        for (number, (window, remote)) in windows.iter().enumerate() {
            let value = round << 32 | number as u64;
            remote.put(8, &value.to_le_bytes()).unwrap();
            assert_eq!(window.load(8), value);
        }
    }
}

#[test]
fn the_full_table_gives_the_same_bytes() {
    let pair = pair(&EndpointBuilder::new().lookup(LookupConfig::flat()));
    both_kinds(&pair, Rights::READ_WRITE, |owned, remote| at_random(owned, &remote, 100));
}

#[test]
fn an_endpoint_can_attach_its_own_windows() {
    let endpoint = Endpoint::open(&memferry_testing::message::unique("own")).unwrap();
    let window = endpoint.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
    let remote = endpoint.attach(endpoint.self_peer().unwrap(), window.handle()).unwrap();
    at_random(&window, &remote, 100);
    assert_eq!(window.withdraw().unwrap().len(), BYTES);
    assert_eq!(remote.put(0, &[1]), Err(Error::Withdrawn));
}

#[test]
fn rights_are_kept() {
    let pair = pair(&EndpointBuilder::new());
    both_kinds(&pair, Rights::READ, |owned, remote| {
        owned.write(10, b"read me");
        let mut got = [0; 7];
        remote.get(10, &mut got).unwrap();
        assert_eq!(&got, b"read me");
        let refused = Error::NotPermitted { asked: Rights::WRITE, given: Rights::READ };
        assert_eq!(remote.put(10, b"written"), Err(refused.clone()));
        assert_eq!(remote.iput(10, b"written".to_vec()).unwrap_err().error, refused);
        let notify = PutNotification { offset: 0, value: 1 };
        assert_eq!(remote.put_notify(0, &[], notify), Err(refused));
        owned.read(10, &mut got);
        assert_eq!(&got, b"read me");
    });
    both_kinds(&pair, Rights::WRITE, |owned, remote| {
        remote.put(10, b"written").unwrap();
        let refused = Error::NotPermitted { asked: Rights::READ, given: Rights::WRITE };
        assert_eq!(remote.get(10, &mut [0; 7]), Err(refused));
        let mut got = [0; 7];
        owned.read(10, &mut got);
        assert_eq!(&got, b"written");
    });
}

#[test]
fn nothing_is_accessed_outside_a_window() {
    let pair = pair(&EndpointBuilder::new());
    // A window in the middle of a buffer: the bytes beside it are not exposed.
    let mut buffer = vec![7u8; 3000];
    let middle = buffer.as_mut_ptr().wrapping_add(1000);
    // SAFETY: the buffer lives until the window is withdrawn.
    let window = unsafe { pair.there.expose_raw(middle, 1000, Rights::READ_WRITE) }.unwrap();
    let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
    let outside = |offset: u64, bytes: usize| {
        let error =
            ValidationError::OutsideWindow { offset, bytes: bytes as u64, window_bytes: 1000 };
        assert_eq!(remote.put(offset, &vec![1; bytes]), Err(error.clone().into()));
        assert_eq!(remote.get(offset, &mut vec![1; bytes]), Err(error.clone().into()));
        assert_eq!(remote.iput(offset, vec![1u8; bytes]).unwrap_err().error, error.into());
    };
    outside(0, 1001);
    outside(1000, 1);
    outside(u64::MAX, 2);
    outside(1 << 40, 1);
    remote.put(0, &[1; 1000]).unwrap();
    remote.put(1000, &[]).unwrap();
    let misplaced = PutNotification { offset: 996, value: u64::MAX };
    assert!(remote.put_notify(0, &[1], misplaced).is_err());
    let misaligned = (0..8).filter(|&offset| {
        remote
            .put_notify(0, &[1], PutNotification { offset, value: 0x0101_0101_0101_0101 })
            .is_err()
    });
    assert_eq!(misaligned.count(), 7);
    window.withdraw().unwrap();
    assert!(buffer[..1000].iter().chain(&buffer[2000..]).all(|&byte| byte == 7));
    assert!(buffer[1000..2000].iter().all(|&byte| byte == 1));
}

#[test]
fn a_withdrawn_window_ends_at_once_and_its_handle_stays_dead() {
    let pair = pair(&EndpointBuilder::new());
    let window = pair.there.expose(vec![0u8; BYTES], Rights::READ_WRITE).unwrap();
    let handle = window.handle();
    let remote = pair.here.attach(pair.to_there, handle).unwrap();
    remote.put(0, &[1; 100]).unwrap();
    let buffer = window.withdraw().unwrap();
    assert_eq!(remote.put(0, &[2; 100]), Err(Error::Withdrawn));
    assert_eq!(remote.get(0, &mut [2; 100]), Err(Error::Withdrawn));
    let outcome = remote.iput(0, vec![2u8; 1 << 20]).unwrap().wait().unwrap_err();
    assert_eq!(outcome.error, Error::Withdrawn);
    assert_eq!(pair.here.attach(pair.to_there, handle).unwrap_err(), Error::Withdrawn);
    // The same memory again, under the same number: still another window.
    let again = pair.there.expose(buffer, Rights::READ_WRITE).unwrap();
    assert_eq!(remote.put(0, &[3; 100]), Err(Error::Withdrawn));
    assert_eq!(again.withdraw().unwrap()[..100], [1; 100]);
}

#[test]
fn windows_are_withdrawn_in_the_middle_of_long_accesses() {
    let pair = pair(&EndpointBuilder::new());
    for round in 0..60 {
        let bytes = 8 << 20;
        let shareable = round % 2 == 0;
        let (handle, end): (WindowHandle, Box<dyn FnOnce() -> Vec<u8>>) = if shareable {
            let buffer = ShareableBuffer::new(bytes).unwrap();
            let window = pair.there.expose(buffer, Rights::READ_WRITE).unwrap();
            (window.handle(), Box::new(move || withdraw(window).to_vec()))
        } else {
            let window = pair.there.expose(vec![0; bytes], Rights::READ_WRITE).unwrap();
            (window.handle(), Box::new(move || withdraw(window)))
        };
        let remote = pair.here.attach(pair.to_there, handle).unwrap();
        let after = std::thread::scope(|scope| {
            let putting = scope.spawn(|| {
                let data = vec![1u8; bytes];
                (0..50).find_map(|_| remote.put(0, &data).err())
            });
            std::thread::sleep(Duration::from_micros(300 * round as u64 % 5000));
            let mut memory = end();
            // No peer writes any more: what is marked now stays marked.
            fill(&mut memory, 5);
            std::thread::yield_now();
            let outcome = putting.join().unwrap();
            assert!(matches!(outcome, None | Some(Error::Withdrawn)), "{outcome:?}");
            memory
        });
        assert_eq!(first_wrong(&after, 5), None);
    }
}

#[test]
fn a_handle_works_with_its_own_peer_alone() {
    let (first, second) = (pair(&EndpointBuilder::new()), pair(&EndpointBuilder::new()));
    let window = first.there.expose(vec![0u8; 100], Rights::READ_WRITE).unwrap();
    let wrong = second.here.attach(second.to_there, window.handle()).unwrap_err();
    assert_eq!(wrong, ValidationError::ForeignHandle.into());
    let mut bytes = window.handle().to_bytes();
    assert_eq!(WindowHandle::from_bytes(bytes), Ok(window.handle()));
    bytes[9] ^= 1;
    assert!(WindowHandle::from_bytes(bytes).is_err());
    // A peer that exposes nothing has no windows to guess.
    let none = Peer::clone(&first.to_here);
    assert!(first.there.attach(none, window.handle()).is_err());
}

#[test]
fn a_notification_wakes_the_owner_and_comes_after_the_data() {
    let pair = pair(&EndpointBuilder::new());
    both_kinds(&pair, Rights::READ_WRITE, |owned, remote| {
        // An address that is aligned to eight, wherever the buffer begins.
        const VARIABLE: usize = BYTES - 1000 + 8 - (BYTES - 1000) % 8;
        owned.write(VARIABLE, &[0; 8]);
        std::thread::scope(|scope| {
            let remote = &remote;
            scope.spawn(move || {
                for turn in 1..=300u64 {
                    let length = 1 << (turn % 20);
                    let notify = PutNotification { offset: VARIABLE as u64, value: turn };
                    if turn % 3 == 0 {
                        std::thread::sleep(Duration::from_millis(turn % 2 * 2));
                    }
                    remote.put_notify(0, &pattern(length, turn), notify).unwrap();
                    // Until the value is consumed.
                    until("the owner has read it", || {
                        let mut word = [0; 8];
                        remote.get(VARIABLE as u64 + 8, &mut word).unwrap();
                        u64::from_ne_bytes(word) == turn
                    });
                }
            });
            for turn in 1..=300u64 {
                assert_eq!(owned.wait(VARIABLE, turn), turn);
                let mut data = vec![0; 1 << (turn % 20)];
                owned.read(0, &mut data);
                assert_eq!(first_wrong(&data, turn), None, "turn {turn}");
                owned.write(VARIABLE + 8, &turn.to_ne_bytes());
            }
        });
        assert_eq!(owned.load(VARIABLE), 300);
    });
}

#[test]
fn accesses_that_are_begun_end_in_order() {
    let pair = pair(&EndpointBuilder::new());
    both_kinds(&pair, Rights::READ_WRITE, |owned, remote| {
        // All to the same offset: the last must win, and the get must see it.
        let puts: Vec<_> = (0..40u64)
            .map(|turn| remote.iput(0, pattern(200_000 - turn as usize, turn)).unwrap())
            .collect();
        let got = remote.iget(0, vec![0; 200_000 - 39]).unwrap();
        assert_eq!(first_wrong(&got.wait().unwrap().1, 39), None);
        for put in puts {
            assert!(put.wait().is_ok());
        }
        let mut all = vec![0; 200_000 - 39];
        owned.read(0, &mut all);
        assert_eq!(first_wrong(&all, 39), None);
        pair.here.scope(|scope| {
            let (data, mut back) = (pattern(100_000, 3), vec![0; 100_000]);
            let data: &[u8] = Box::leak(data.into_boxed_slice());
            let back: &mut [u8] = Box::leak(std::mem::take(&mut back).into_boxed_slice());
            let mut put = scope.iput(&remote, 5, data).unwrap();
            let mut get = scope.iget(&remote, 5, back).unwrap();
            assert_eq!(get.wait().unwrap().length, 100_000);
            assert!(put.wait().is_ok());
        });
    });
}

#[test]
fn many_threads_access_many_windows() {
    let pair = pair(&small(MissPolicy::Wait));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let pair = &pair;
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for _ in 0..30 {
                    let bytes = 1 + random.below(2 << 20) as usize;
                    let window = pair.there.expose(vec![0; bytes], Rights::READ_WRITE).unwrap();
                    let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
                    let seed = random.next_u64();
                    remote.put(0, &pattern(bytes, seed)).unwrap();
                    let mut back = vec![0; bytes];
                    remote.get(0, &mut back).unwrap();
                    assert_eq!(first_wrong(&back, seed), None);
                    assert_eq!(first_wrong(&withdraw(window), seed), None);
                }
            });
        }
    });
}

#[test]
fn other_memory_at_the_same_address_is_never_confused_with_the_old() {
    let pair = pair(&small(MissPolicy::Wait));
    let mut seen = std::collections::HashMap::new();
    let bytes = 4 << 20;
    for round in 0..400u64 {
        // After a free, a new allocation of this size gets the same address.
        let (address, wrong) = match round % 3 {
            0 => {
                let buffer = ShareableBuffer::new(bytes).unwrap();
                check_fresh(&pair, buffer, bytes, round)
            }
            1 => check_fresh(&pair, vec![0u8; bytes], bytes, round),
            _ => {
                let pages = memferry_sys::Pages::new(bytes).unwrap();
                check_fresh(&pair, PagesBuffer(pages), bytes, round)
            }
        };
        assert_eq!(wrong, None, "round {round}");
        *seen.entry(address).or_insert(0) += 1;
    }
    assert!(seen.values().any(|&times| times > 50), "addresses must be reused: {seen:?}");
}

struct PagesBuffer(memferry_sys::Pages);

// SAFETY: pages do not move.
unsafe impl memferry_copy::OwnedTarget for PagesBuffer {
    fn target(&mut self) -> (*mut u8, usize) {
        (self.0.as_ptr(), self.0.len())
    }
}

/// Puts to a new window, checks the owner's memory; returns its address.
fn check_fresh<B: memferry_copy::OwnedTarget>(
    pair: &Pair,
    buffer: B,
    bytes: usize,
    round: u64,
) -> (usize, Option<usize>) {
    let window = pair.there.expose(buffer, Rights::READ_WRITE).unwrap();
    let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
    let (offset, length) = ((round * 4096 * 3) as usize % (bytes / 2), 100_000);
    remote.put(offset as u64, &pattern(length, round)).unwrap();
    let mut seen = vec![0; length];
    window.read(offset, &mut seen);
    (window.as_ptr() as usize, first_wrong(&seen, round))
}

#[test]
fn a_window_of_64_gib_needs_little_memory() {
    let pair = pair(&EndpointBuilder::new());
    let bytes = 64usize << 30;
    let window = pair.there.expose(ShareableBuffer::new(bytes).unwrap(), Rights::READ_WRITE);
    let window = window.unwrap();
    let remote = pair.here.attach(pair.to_there, window.handle()).unwrap();
    let mut random = Random::new(5);
    let places: Vec<u64> = (0..2000).map(|_| random.below((bytes - 64) as u64)).collect();
    for &place in &places {
        remote.put(place, &place.to_le_bytes()).unwrap();
    }
    // Two of them may overlap; hardly any do.
    let right = places.iter().filter(|&&place| {
        let mut word = [0; 8];
        remote.get(place, &mut word).unwrap();
        u64::from_le_bytes(word) == place
    });
    assert!(right.count() > 1990);
    let memory = pair.here.lookup_memory().unwrap();
    assert!(memory.cache_total() < 4 << 20, "{memory:?}");
    let counters = pair.here.lookup_counters().unwrap();
    assert!(counters.attached > 100, "so large a window is looked up: {counters:?}");
}

#[test]
fn a_closed_owner_is_gone_for_its_windows() {
    let Pair { here, there, to_there, .. } = pair(&EndpointBuilder::new());
    let window = there.expose(vec![0u8; 100], Rights::READ_WRITE).unwrap();
    let remote = here.attach(to_there, window.handle()).unwrap();
    remote.put(0, &[1]).unwrap();
    there.close();
    until("the owner's exit is detected", || {
        matches!(remote.put(0, &[1]), Err(Error::PeerDisconnected(_) | Error::Withdrawn))
    });
    until("it has a name", || matches!(remote.put(0, &[1]), Err(Error::PeerDisconnected(_))));
    assert!(matches!(here.attach(to_there, window.handle()), Err(Error::PeerDisconnected(_))));
    let Pair { here, there, to_there, .. } = pair(&EndpointBuilder::new());
    let window = there.expose(vec![0u8; 1 << 20], Rights::READ_WRITE).unwrap();
    let remote = here.attach(to_there, window.handle()).unwrap();
    let begun: Vec<_> = (0..20).map(|_| remote.iput(0, vec![1u8; 1 << 20]).unwrap()).collect();
    here.close();
    for put in begun {
        let error = put.wait().err().map(|failed| failed.error);
        assert!(
            matches!(error, None | Some(Error::Closed | Error::PeerDisconnected(_))),
            "{error:?}"
        );
    }
    assert!(remote.put(0, &[1]).is_err());
}
