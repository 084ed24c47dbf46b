//! Many threads, random sizes, alignments, strategies and policies at once; every byte is checked.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{builder, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{Ferry, Notification, Options, Request};

/// A small generator, so that a failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }

    fn length(&mut self) -> usize {
        let limit = [64, 5_000, 40_000, 300_000, 2_000_000][self.below(5)];
        self.below(limit)
    }
}

fn one_copy(ferry: &Ferry, random: &mut Random) {
    let (length, skip, way) = (random.length(), random.below(130), random.below(7));
    let source = pattern(length + skip, random.0);
    let expected = &source[skip..];
    let mut target = vec![0xEE; length + skip + 64];
    let inside = skip..skip + length;
    match way {
        0 => ferry.copy(expected, &mut target[inside.clone()]).unwrap(),
        1 => ferry.scope(|scope| {
            let transfer = scope.icopy(expected, &mut target[inside.clone()]).unwrap();
            let ready = transfer.ready();
            assert!(ready == &expected[..ready.len()]);
            if random.below(2) == 0 {
                assert!(transfer.into_target().unwrap() == expected);
            }
        }),
        2 => {
            let (_, copy) =
                ferry.icopy(expected.to_vec(), vec![0u8; length]).unwrap().wait().unwrap();
            target[inside.clone()].copy_from_slice(&copy);
        }
        3 => {
            // SAFETY: source and target live until after the wait.
            let cookie = unsafe {
                ferry
                    .icopy_cookie_raw(
                        expected.as_ptr(),
                        target[inside.clone()].as_mut_ptr(),
                        length,
                    )
                    .unwrap()
            };
            ferry.wait(cookie).unwrap();
        }
        4 => {
            let variable = Notification::new(0);
            ferry.scope(|scope| {
                let options = Options::new().notify(&variable, 1);
                drop(scope.icopy_with(expected, &mut target[inside.clone()], options).unwrap());
                assert!(variable.wait(1, Some(Duration::from_secs(200))));
            });
        }
        5 => {
            let mut between = vec![0u8; length];
            let to = target[inside.clone()].as_mut_ptr();
            // SAFETY: all three buffers live until after the wait; the order makes `between`
            // finished before it is read.
            unsafe {
                let first = Request::copy(expected.as_ptr(), between.as_mut_ptr(), length);
                let first = ferry.start_raw(first).unwrap();
                let second = Request::copy(between.as_ptr(), to, length);
                let options = Options::new().after(&first).no_caller_assist();
                ferry.start_raw(second.with(options)).unwrap().wait().unwrap();
            }
        }
        _ => {
            ferry.fill(&mut target[inside.clone()], 0x31).unwrap();
            assert!(target[inside.clone()].iter().all(|&byte| byte == 0x31));
            target[inside.clone()].copy_from_slice(expected);
            assert_eq!(ferry.compare(expected, &target[inside.clone()]), Ok(None));
        }
    }
    assert!(target[inside.clone()] == *expected, "way {way}, {length} bytes");
    assert!(target[..skip].iter().chain(&target[skip + length..]).all(|&byte| byte == 0xEE));
}

#[test]
fn many_threads_with_random_copies_get_every_byte_right() {
    const THREADS: u64 = 6;
    const COPIES: usize = 60;
    for (round, policy) in PolicyKind::ALL.into_iter().enumerate() {
        for channels in [1, 3] {
            let capacity = if channels == 1 { 4 } else { 256 };
            let ferry =
                builder().policy(policy).channels(channels).capacity(capacity).build().unwrap();
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let ferry = &ferry;
                    scope.spawn(move || {
                        let mut random = Random(0xFEE1_600D + thread * 7919 + round as u64);
                        for _ in 0..COPIES {
                            one_copy(ferry, &mut random);
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn a_long_chain_of_ordered_transfers_keeps_its_order() {
    let ferry = builder().capacity(16).build().unwrap();
    let steps: Vec<Vec<u8>> = (0..2000).map(|seed| pattern(3000, seed)).collect();
    let mut target = vec![0u8; 3000];
    let mut last: Option<memferry_copy::Transfer> = None;
    for step in &steps {
        let options = last.iter().fold(Options::new(), Options::after);
        let request = Request::copy(step.as_ptr(), target.as_mut_ptr(), step.len());
        // SAFETY: every step and the target live until after the wait, and the order makes each
        // write to the target follow the one before.
        last = Some(unsafe { ferry.start_raw(request.with(options)) }.unwrap());
    }
    last.unwrap().wait().unwrap();
    assert!(target == *steps.last().unwrap());
}

#[test]
fn channels_that_sleep_between_copies_always_wake() {
    let ferry = Arc::new(builder().spin_ns(0).build().unwrap());
    for round in 0..2000u64 {
        let length = 2000 + (round as usize * 37) % 3000;
        let transfer = ferry.icopy(pattern(length, round), vec![0u8; length]).unwrap();
        let (source, target) = transfer.wait().unwrap();
        assert!(source == target);
        if round % 16 == 0 {
            std::thread::yield_now();
        }
    }
    assert!(ferry.statistics().engine("cpu").sleeps > 0);
}
