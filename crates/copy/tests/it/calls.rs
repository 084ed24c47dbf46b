//! Every call of the copy core, with sizes for every strategy.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{SIZES, builder, ferry, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{Buffer, CacheHint, Error, Ferry, Notification, Options, Request};
use memferry_engine::ExecutionError;

#[test]
fn a_blocking_copy_copies_every_size() {
    let ferry = ferry();
    for length in SIZES {
        let source = pattern(length, 1);
        let mut target = vec![0; length];
        ferry.copy(&source, &mut target).unwrap();
        assert!(source == target, "{length}");
    }
}

#[test]
fn cookies_can_be_checked_and_waited_for() {
    let ferry = ferry();
    for length in SIZES {
        let source = pattern(length, 2);
        let mut target = vec![0u8; length];
        // SAFETY: both vectors live until after the wait.
        let cookie =
            unsafe { ferry.icopy_cookie_raw(source.as_ptr(), target.as_mut_ptr(), length) }
                .unwrap();
        assert!(cookie.to_raw() >= 0);
        while !ferry.check(cookie).unwrap() {
            std::thread::yield_now();
        }
        ferry.wait(cookie).unwrap();
        assert!(source == target, "{length}");
    }
}

#[test]
fn owned_buffers_come_back_copied() {
    let ferry = ferry();
    for length in SIZES {
        let transfer = ferry.icopy(pattern(length, 3), vec![0u8; length]).unwrap();
        let (source, target) = transfer.wait().unwrap();
        assert!(source == target, "{length}");
    }
    let source: Arc<[u8]> = pattern(100_000, 4).into();
    let target = Buffer::new(100_000).unwrap();
    let (_, target) = ferry.icopy(source.clone(), target).unwrap().wait().unwrap();
    assert!(source[..] == target[..]);
    let boxed: Box<[u8]> = pattern(70_000, 5).into();
    let (boxed, copy) =
        ferry.icopy(boxed, vec![0u8; 70_000].into_boxed_slice()).unwrap().wait().unwrap();
    assert!(boxed == copy);
}

#[test]
fn scoped_borrows_come_back_from_their_handle() {
    let ferry = ferry();
    for length in SIZES {
        let source = pattern(length, 6);
        let mut target = vec![0; length];
        ferry.scope(|scope| {
            let transfer = scope.icopy(&source, &mut target).unwrap();
            let target = transfer.into_target().unwrap();
            assert!(source == target, "{length}");
            target.fill(1);
        });
        assert!(target.iter().all(|&byte| byte == 1));
    }
}

#[test]
fn a_scope_waits_for_handles_that_were_dropped_forgotten_or_lost_in_a_panic() {
    let ferry = ferry();
    let source = pattern(3 << 20, 7);
    let mut targets = vec![vec![0u8; 3 << 20]; 3];
    let [first, second, third] = &mut targets[..] else { unreachable!() };
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        ferry.scope(|scope| {
            drop(scope.icopy(&source, first).unwrap());
            std::mem::forget(scope.icopy(&source, second).unwrap());
            let _third = scope.icopy(&source, third).unwrap();
            panic!("on purpose");
        });
    }));
    assert!(panicked.is_err());
    assert!(targets.iter().all(|target| *target == source));
}

#[test]
fn a_dropped_owned_transfer_keeps_its_buffers_until_the_end() {
    let ferry = ferry();
    let variable = Arc::new(Notification::new(0));
    for round in 1..=200 {
        let options = Options::new().notify_shared(&variable, round);
        drop(ferry.icopy_with(pattern(200_000, round), vec![0u8; 200_000], options).unwrap());
    }
    for _ in 0..200 {
        drop(ferry.icopy(vec![1u8; 4096], vec![0u8; 4096]).unwrap());
    }
    drop(ferry);
    assert_ne!(variable.load(), 0);
}

#[test]
fn fill_sets_and_compare_finds() {
    let ferry = ferry();
    for length in SIZES {
        let mut target = vec![0u8; length];
        ferry.fill(&mut target, 0x77).unwrap();
        assert!(target.iter().all(|&byte| byte == 0x77));
        let other = target.clone();
        assert_eq!(ferry.compare(&target, &other).unwrap(), None);
        for at in [0, length / 2, length.saturating_sub(1)] {
            if at < length {
                let mut other = other.clone();
                other[at] = 0;
                other[length - 1] = 0;
                assert_eq!(ferry.compare(&target, &other).unwrap(), Some(at), "{length}");
            }
        }
    }
    let filled = ferry.ifill(vec![0u8; 300_000], 9).unwrap();
    assert!(filled.wait().unwrap().1.iter().all(|&byte| byte == 9));
}

#[test]
fn copies_inside_one_buffer_behave_as_memmove() {
    let ferry = ferry();
    for length in [100usize, 5_000, 300_000, 2_000_000] {
        for shift in [1, 64, length / 3] {
            let original = pattern(length, 8);
            for (from, to) in [(0, shift), (shift, 0)] {
                let mut expected = original.clone();
                expected.copy_within(from..from + length - shift, to);
                let mut ours = original.clone();
                ferry.copy_within(&mut ours, from..from + length - shift, to).unwrap();
                assert!(ours == expected, "blocking, {length} by {shift}");
                let mut ours = original.clone();
                let start = ours.as_mut_ptr();
                // SAFETY: both ranges lie inside the vector, which lives until after the wait.
                let cookie = unsafe {
                    ferry.icopy_cookie_raw(start.add(from), start.add(to), length - shift).unwrap()
                };
                ferry.wait(cookie).unwrap();
                assert!(ours == expected, "asynchronous, {length} by {shift}");
            }
        }
    }
}

#[test]
fn a_transfer_after_another_sees_its_result() {
    let ferry = ferry();
    for length in [100usize, 8 << 10, 200_000, 2 << 20] {
        let first = pattern(length, 9);
        let (mut second, mut third, mut fourth) =
            (vec![0; length], vec![0; length], vec![0; length]);
        let request =
            |from: &[u8], to: &mut [u8]| Request::copy(from.as_ptr(), to.as_mut_ptr(), from.len());
        // SAFETY: all vectors live until after the last wait, and the order makes every source
        // finished before it is read.
        unsafe {
            let one = ferry.start_raw(request(&first, &mut second)).unwrap();
            let two = ferry
                .start_raw(request(&second, &mut third).with(Options::new().after(&one)))
                .unwrap();
            let three = ferry
                .start_raw(
                    request(&third, &mut fourth).with(Options::new().after(&two).after(&one)),
                )
                .unwrap();
            three.wait().unwrap();
        }
        assert!(first == fourth, "{length}");
    }
}

#[test]
fn what_follows_a_cancelled_transfer_is_not_begun() {
    let ferry = builder().channels(1).build().unwrap();
    let source = vec![1u8; 64 << 20];
    let mut cancelled = 0;
    for _ in 0..20 {
        let (mut target, mut follower) = (vec![0u8; 64 << 20], vec![7u8; 4096]);
        // SAFETY: all buffers live until after both waits.
        let (first, second) = unsafe {
            let first = ferry
                .start_raw(Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len()))
                .unwrap();
            let after = Options::new().after(&first);
            let request = Request::copy(source.as_ptr(), follower.as_mut_ptr(), 4096).with(after);
            (first, ferry.start_raw(request).unwrap())
        };
        first.cancel();
        match first.wait() {
            Ok(_) => assert!(second.wait().is_ok() && target == source),
            Err(Error::Execution(ExecutionError::Cancelled { done_bytes })) => {
                cancelled += 1;
                assert!(done_bytes < source.len() as u64);
                assert_eq!(second.wait(), Err(ExecutionError::Predecessor.into()));
                assert!(follower.iter().all(|&byte| byte == 7));
                let ready = first.ready_bytes() as usize;
                assert!(target[..ready].iter().all(|&byte| byte == 1));
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(cancelled > 0, "64 MiB are not begun at once");
}

#[test]
fn the_notification_arrives_after_the_data() {
    let ferry = ferry();
    for length in [8usize, 4096, 100_000, 1 << 20] {
        let source = pattern(length, 10);
        let mut target = vec![0u8; length];
        let variable = Notification::new(0);
        ferry.scope(|scope| {
            let transfer = scope
                .icopy_with(&source, &mut target, Options::new().notify(&variable, 42))
                .unwrap();
            assert!(variable.wait(42, Some(Duration::from_secs(200))));
            assert!(transfer.is_done() || transfer.ready().len() == length || length <= 1 << 20);
            transfer.wait().unwrap();
            assert!(transfer.ready() == source);
        });
    }
}

#[test]
fn finished_parts_can_be_used_while_the_rest_moves() {
    let ferry = ferry();
    let length = 32 << 20;
    let source = pattern(length, 11);
    let mut target = vec![0u8; length];
    ferry.scope(|scope| {
        let transfer = scope.icopy(&source, &mut target).unwrap();
        for start in (0..length).step_by(1 << 20) {
            let range = start..start + (1 << 20);
            assert!(transfer.wait_range(range.clone()).unwrap() == &source[range]);
        }
        let ready = transfer.ready();
        assert!(ready == &source[..ready.len()]);
        transfer.wait().unwrap();
        assert!(transfer.ready() == source);
    });
}

#[test]
fn a_transfer_is_a_future() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let ferry = ferry();
    runtime.block_on(async {
        for length in SIZES {
            let source = pattern(length, 12);
            let transfer = ferry.icopy(source, vec![0u8; length]).unwrap();
            let (source, target) = transfer.await.unwrap();
            assert!(source == target, "{length}");
        }
        let mut tasks = Vec::new();
        for seed in 0..64 {
            let ferry = ferry.clone();
            tasks.push(tokio::spawn(async move {
                let length = 1000 + seed as usize * 3001;
                let transfer = ferry.icopy(pattern(length, seed), vec![0u8; length]).unwrap();
                let (source, target) = transfer.await.unwrap();
                assert!(source == target);
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
fn an_eventfd_becomes_readable_at_the_end() {
    let ferry = ferry();
    for length in [16usize, 8 << 10, 300_000, 4 << 20] {
        let transfer = ferry.icopy(pattern(length, 13), vec![0u8; length]).unwrap();
        let event = transfer.transfer().event().unwrap();
        let mut polled =
            [rustix::event::PollFd::from_borrowed_fd(event.as_fd(), rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&limit)), Ok(1));
        assert!(transfer.is_done());
        let (source, target) = transfer.wait().unwrap();
        assert!(source == target);
    }
}

#[test]
fn every_policy_and_wish_gives_the_same_bytes() {
    for policy in PolicyKind::ALL {
        for channels in [1, 3] {
            let ferry = builder().policy(policy).channels(channels).build().unwrap();
            for length in SIZES {
                for options in [
                    Options::new(),
                    Options::new().cache_hint(CacheHint::Cold),
                    Options::new().cache_hint(CacheHint::Hot),
                    Options::new().no_caller_assist(),
                ] {
                    let source = pattern(length, 14);
                    let mut target = vec![0; length];
                    ferry.copy_with(&source, &mut target, options).unwrap();
                    assert!(source == target, "{policy:?} {length}");
                }
            }
        }
    }
}

#[test]
fn under_the_dedicated_policy_small_copies_share_no_channel_with_large_ones() {
    for channels in [1, 2] {
        let ferry = builder().policy(PolicyKind::Dedicated).channels(channels).build().unwrap();
        let large = vec![1u8; 4 << 20];
        let mut targets = vec![vec![0u8; 4 << 20]; 4];
        ferry.scope(|scope| {
            for target in &mut targets {
                drop(scope.icopy(&large, target).unwrap());
                let small = ferry.icopy(vec![2u8; 4096], vec![0u8; 4096]).unwrap();
                assert_eq!(small.wait().unwrap().1, vec![2u8; 4096]);
            }
        });
        let engines = ferry.statistics().engines;
        let submitted: Vec<_> = engines[0].1.iter().map(|channel| channel.submitted).collect();
        // With one channel the caller copies the small ones inline.
        let expected: &[u64] = if channels == 1 { &[4] } else { &[4, 4] };
        assert_eq!(submitted, expected);
    }
}

#[test]
fn statistics_count_what_was_done() {
    let ferry = builder().channels(1).build().unwrap();
    let before = ferry.statistics();
    assert_eq!(before.engine("cpu").submitted, 0);
    let copy = |length: usize| ferry.icopy(vec![1u8; length], vec![0u8; length]).unwrap();
    let transfers: Vec<_> = [100, 8 << 10, 4 << 20].into_iter().map(copy).collect();
    for transfer in transfers {
        transfer.wait().unwrap();
    }
    let mut after = ferry.statistics();
    // The sequence is published right after the data.
    while after.engine("cpu").completed < 2 {
        std::thread::yield_now();
        after = ferry.statistics();
    }
    let cpu = after.engine("cpu");
    assert_eq!((cpu.submitted, cpu.completed, cpu.failed), (2, 2, 0));
    let moved = cpu.bytes + after.caller_chunks * (64 << 10);
    assert!(moved >= (8 << 10) + (4 << 20), "{after:?}");
}

#[test]
fn a_default_ferry_works_and_explains_itself() {
    let ferry = Ferry::new().unwrap();
    let source = pattern(5 << 20, 15);
    let mut target = vec![0; 5 << 20];
    ferry.copy(&source, &mut target).unwrap();
    assert!(source == target);
    let plan = ferry.explain(&memferry_copy::plan::CopyQuery::copy(5 << 20, true)).unwrap();
    assert!(!plan.reason.to_string().is_empty());
}

#[test]
fn handles_are_shown_in_a_line() {
    let ferry = Ferry::new().unwrap();
    let transfer = ferry.icopy(vec![83u8; 8 << 20], vec![83u8; 8 << 20]).unwrap();
    let mut shown = vec![format!("{ferry:?}"), format!("{transfer:?}")];
    ferry.scope(|scope| shown.push(format!("{scope:?}")));
    let _ = transfer.wait();
    for text in &shown {
        assert!(text.len() < 300 && !text.contains("83, 83"), "{text}");
    }
    assert!(shown[1].contains("length: 8388608"), "{}", shown[1]);
}
