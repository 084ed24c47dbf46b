//! Invalid input has a defined result: an error with its reason; nothing is lost or hangs.

use crate::common::{builder, ferry, pattern};
use memferry_copy::policy::PolicyKind;
use memferry_copy::{BuildError, Cookie, CookieError, Error, Ferry, Request, ValidationError};
use memferry_engine::MemoryKind;
use memferry_testing::rerun;

#[test]
fn null_pointers_are_refused() {
    let ferry = ferry();
    let mut byte = [0u8; 8];
    // SAFETY: the requests are refused before any memory is accessed.
    unsafe {
        let no_source = ferry.icopy_cookie_raw(std::ptr::null(), byte.as_mut_ptr(), 8);
        assert_eq!(no_source, Err(ValidationError::Null { side: "source" }.into()));
        let no_target = ferry.icopy_cookie_raw(byte.as_ptr(), std::ptr::null_mut(), 8);
        assert_eq!(no_target, Err(ValidationError::Null { side: "target" }.into()));
    }
}

#[test]
fn ranges_past_the_end_of_the_address_space_are_refused() {
    let ferry = ferry();
    let mut byte = [0u8; 8];
    let far = (usize::MAX - 3) as *mut u8;
    // SAFETY: the requests are refused before any memory is accessed.
    unsafe {
        let wrapping = ferry.icopy_cookie_raw(far, byte.as_mut_ptr(), 8);
        assert!(matches!(
            wrapping,
            Err(Error::Validation(ValidationError::Wraps { side: "source", .. }))
        ));
        let wrapping = ferry.icopy_cookie_raw(byte.as_ptr(), far, 8);
        assert!(matches!(
            wrapping,
            Err(Error::Validation(ValidationError::Wraps { side: "target", .. }))
        ));
    }
}

#[test]
fn no_bytes_are_no_problem_wherever_they_are() {
    let ferry = ferry();
    // SAFETY: no byte is accessed.
    let cookie =
        unsafe { ferry.icopy_cookie_raw(std::ptr::null(), std::ptr::null_mut(), 0) }.unwrap();
    assert_eq!(ferry.check(cookie), Ok(true));
    assert_eq!(ferry.wait(cookie), Ok(()));
    ferry.copy::<u8>(&[], &mut []).unwrap();
    ferry.fill(&mut [], 1).unwrap();
    assert_eq!(ferry.compare::<u8>(&[], &[]), Ok(None));
    assert!(ferry.icopy(Vec::<u8>::new(), Vec::<u8>::new()).unwrap().wait().is_ok());
}

#[test]
fn unequal_lengths_are_refused_and_owned_buffers_given_back() {
    let ferry = ferry();
    let mismatch = ValidationError::LengthMismatch { source_bytes: 3, target_bytes: 4 };
    assert_eq!(ferry.copy(&[1u8; 3], &mut [0; 4]), Err(mismatch.clone().into()));
    assert!(ferry.compare(&[1u8; 3], &[0; 4]).is_err());
    let failed = ferry.icopy(vec![1u8; 3], vec![0u8; 4]).unwrap_err();
    assert_eq!((failed.error, failed.source.len(), failed.target.len()), (mismatch.into(), 3, 4));
    let mut target = [0; 4];
    ferry.scope(|scope| assert!(scope.icopy(&[1u8; 3], &mut target).is_err()));
}

#[test]
fn ranges_outside_a_buffer_are_refused() {
    let ferry = ferry();
    let mut buffer = [0u8; 10];
    assert!(ferry.copy_within(&mut buffer, 0..11, 0).is_err());
    assert!(ferry.copy_within(&mut buffer, 5..10, 6).is_err());
    assert!(ferry.copy_within(&mut buffer, 5.., usize::MAX).is_err());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = ferry.copy_within(&mut buffer, 7..3, 0);
    assert!(reversed.is_err());
    let transfer = ferry.icopy(vec![0u8; 10], vec![0u8; 10]).unwrap();
    assert!(transfer.wait_range(5..11).is_err());
}

#[test]
fn foreign_and_unknown_cookies_are_told_apart() {
    let (one, other) = (ferry(), ferry());
    let mut target = [0u8; 4];
    // SAFETY: four bytes, copied at once.
    let cookie =
        unsafe { one.icopy_cookie_raw([1u8; 4].as_ptr(), target.as_mut_ptr(), 4) }.unwrap();
    let raw = cookie.to_raw();
    assert_eq!(other.check(cookie), Err(CookieError::Foreign(raw).into()));
    assert_eq!(other.wait(cookie), Err(CookieError::Foreign(raw).into()));
    assert_eq!(one.wait(Cookie::from_raw(-1)), Err(CookieError::Foreign(-1).into()));
    let next = Cookie::from_raw(raw + 1);
    assert_eq!(one.wait(next), Err(CookieError::Unknown(raw + 1).into()));
}

#[test]
fn a_cookie_of_a_closed_ferry_is_stale() {
    let mut target = [0u8; 4];
    let closed = ferry();
    // SAFETY: four bytes, copied at once.
    let cookie =
        unsafe { closed.icopy_cookie_raw([1u8; 4].as_ptr(), target.as_mut_ptr(), 4) }.unwrap();
    drop(closed);
    assert_eq!(ferry().wait(cookie), Err(CookieError::Foreign(cookie.to_raw()).into()));
}

#[test]
fn a_second_wait_gives_the_same_answer_however_much_later() {
    let ferry = ferry();
    let source = pattern(20_000, 1);
    let mut target = vec![0u8; 20_000];
    // SAFETY: both vectors live until after the waits.
    let cookie =
        unsafe { ferry.icopy_cookie_raw(source.as_ptr(), target.as_mut_ptr(), 20_000) }.unwrap();
    ferry.wait(cookie).unwrap();
    let mut sink = vec![0u8; 2048];
    for _ in 0..5000 {
        // SAFETY: as above; each is waited for before the next.
        let later =
            unsafe { ferry.icopy_cookie_raw(source.as_ptr(), sink.as_mut_ptr(), 2048) }.unwrap();
        ferry.wait(later).unwrap();
    }
    assert_eq!(ferry.wait(cookie), Ok(()));
    assert_eq!(ferry.check(cookie), Ok(true));
}

#[test]
fn thousands_of_unwaited_cookies_stay_valid() {
    let ferry = builder().channels(1).capacity(8).build().unwrap();
    let source = pattern(40_000, 2);
    let mut targets = vec![vec![0u8; 40_000]; 3000];
    let cookies: Vec<_> = targets
        .iter_mut()
        .map(|t| {
            // SAFETY: source and targets live until after the waits.
            unsafe { ferry.icopy_cookie_raw(source.as_ptr(), t.as_mut_ptr(), 40_000) }.unwrap()
        })
        .collect();
    for cookie in cookies {
        ferry.wait(cookie).unwrap();
    }
    assert!(targets.iter().all(|target| *target == source));
}

#[test]
fn a_full_ring_loses_nothing() {
    for policy in PolicyKind::ALL {
        let ferry = builder().channels(1).capacity(1).policy(policy).build().unwrap();
        let source = pattern(10_000, 3);
        let mut targets = vec![vec![0u8; 10_000]; 500];
        ferry.scope(|scope| {
            for target in &mut targets {
                drop(scope.icopy(&source, target).unwrap());
            }
        });
        assert!(targets.iter().all(|target| *target == source));
    }
}

#[test]
fn more_channels_than_cores_work() {
    let ferry = builder().channels(64).spread(64).build().unwrap();
    let source = pattern(8 << 20, 4);
    let mut target = vec![0; 8 << 20];
    ferry.copy(&source, &mut target).unwrap();
    assert!(source == target);
    ferry.copy(&source[..100_000], &mut target[..100_000]).unwrap();
}

#[test]
fn impossible_settings_are_refused_with_the_reason() {
    for channels in [0, 257, usize::MAX] {
        let error = builder().channels(channels).build().unwrap_err();
        assert!(error.to_string().contains("1 to 256"), "{error}");
    }
    let error = builder().bind_to([100_000]).build().unwrap_err();
    assert!(matches!(error, BuildError::Open(_)) && error.to_string().contains("core"), "{error}");
}

#[test]
fn memory_that_no_engine_reaches_is_refused() {
    let mut target = [0u8; 4];
    let request = Request::copy([1u8; 4].as_ptr(), target.as_mut_ptr(), 4)
        .memory(MemoryKind::Host, MemoryKind::Device);
    // SAFETY: refused before any memory is accessed.
    let refused = unsafe { ferry().start_raw(request) }.unwrap_err();
    assert!(matches!(refused, Error::Validation(ValidationError::NoEngine { .. })));
    let text = refused.to_string();
    assert!(
        text.starts_with(
            "no engine of this ferry (cpu) can do the operation copy, source in host memory, target in device memory: "
        ),
        "{text}"
    );
}

#[test]
fn closing_while_copies_are_in_flight_finishes_them() {
    for _ in 0..20 {
        let ferry = ferry();
        let source = pattern(2 << 20, 5);
        let mut targets = vec![vec![0u8; 2 << 20]; 8];
        let transfers: Vec<_> = targets
            .iter_mut()
            .map(|target| {
                let request = Request::copy(source.as_ptr(), target.as_mut_ptr(), source.len());
                // SAFETY: source and targets live until after the waits.
                unsafe { ferry.start_raw(request) }.unwrap()
            })
            .collect();
        drop(ferry);
        for transfer in &transfers {
            assert!(transfer.is_done());
            transfer.wait().unwrap();
        }
        assert!(targets.iter().all(|target| *target == source));
    }
}

#[test]
fn a_bad_environment_value_is_named_with_what_would_be_valid() {
    // The environment belongs to the whole process, so each value is tried in a child.
    const MARK: &str = "MEMFERRY_TEST_BUILD";
    if std::env::var_os(MARK).is_some() {
        let error = Ferry::new().expect_err("the value is bad").to_string();
        assert!(error.contains("MEMFERRY_") && error.contains("expected"), "{error}");
        return;
    }
    for (name, value) in [
        ("MEMFERRY_CHANNELS", "0"),
        ("MEMFERRY_CHANNELS", "many"),
        ("MEMFERRY_CHANNELS", "-1"),
        ("MEMFERRY_CHANNELS", "1000"),
        ("MEMFERRY_POLICY", "random"),
        ("MEMFERRY_STREAMING", "warp"),
        ("MEMFERRY_SPIN_NS", "soon"),
        ("MEMFERRY_CHUNK_BYTES", "64 apples"),
        ("MEMFERRY_CUDA_SOLE_USER", "perhaps"),
    ] {
        let child = rerun()
            .envs([(MARK, "1"), ("MEMFERRY_PROFILE", "off"), (name, value)])
            .output()
            .unwrap();
        assert!(child.status.success(), "{name}={value}: {child:?}");
    }
}

#[test]
fn a_ferry_opens_as_if_empty_variables_were_not_set() {
    const MARK: &str = "MEMFERRY_TEST_BUILD";
    if std::env::var_os(MARK).is_some() {
        let ferry = Ferry::new().expect("an empty value is none");
        let mut target = [0u8; 3];
        ferry.copy(&[1, 2, 3], &mut target).unwrap();
        assert_eq!(target, [1, 2, 3]);
        return;
    }
    let empty = memferry_sys::settings::variables::ALL.iter().map(|name| (*name, ""));
    // The measured values of the machine, if it is quiet enough to save them.
    let cache = tempfile::tempdir().unwrap();
    let child =
        rerun().envs(empty).env(MARK, "1").env("XDG_CACHE_HOME", cache.path()).output().unwrap();
    assert!(child.status.success(), "{child:?}");
}

#[test]
fn a_ferry_names_an_unknown_variable_once_and_reads_sizes_with_units() {
    const MARK: &str = "MEMFERRY_TEST_BUILD";
    if std::env::var_os(MARK).is_some() {
        for _ in 0..2 {
            let ferry = Ferry::new().expect("an unknown variable is no error");
            assert_eq!(ferry.plan_context().profile.chunk_bytes, 192 << 10);
        }
        return;
    }
    let child = rerun()
        .envs([(MARK, "1"), ("MEMFERRY_PROFILE", "OFF"), ("MEMFERRY_CHUNK_BYTES", "192KiB")])
        .env("MEMFERRY_EAGR_BYTES", "1")
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
    let said = String::from_utf8_lossy(&child.stderr);
    assert_eq!(
        said.matches("unknown variable MEMFERRY_EAGR_BYTES; did you mean").count(),
        1,
        "{said}"
    );
}
