use super::*;

#[test]
fn the_cure_for_huge_shared_pages_is_a_command() {
    let never = huge_pages(Ok(0), Some("always within_size advise [never] deny force\n"));
    assert_eq!(never.status, Status::Warn);
    assert_eq!(never.fix.unwrap(), format!("echo advise | sudo tee {HUGE_PAGES}"));
    let granted = huge_pages(Ok(8 << 20), Some("always within_size [advise] never deny force\n"));
    assert_eq!(granted.status, Status::Ok);
    let fragmented = huge_pages(Ok(0), Some("[advise] never"));
    assert!(fragmented.detail.contains("ordinary pages"), "{}", fragmented.detail);
}

#[test]
fn huge_pages_are_read_from_the_mapping_of_the_address_alone() {
    let maps = "7f0000000000-7f0000800000 rw-s 00000000 00:01 1 /memfd:one\n\
                Size:               8192 kB\nShmemPmdMapped:     2048 kB\nVmFlags: rd wr\n\
                7f0000800000-7f0001000000 rw-s 00000000 00:01 2 /memfd:two\n\
                Size:               8192 kB\nShmemPmdMapped:     6144 kB\n\
                7f0001000000-7f0001800000 rw-p 00000000 00:00 0\nSize:               8192 kB\n";
    assert_eq!(huge_bytes(maps, 0x7f00_0000_1000), Some(2 << 20));
    assert_eq!(huge_bytes(maps, 0x7f00_0080_0000), Some(6 << 20));
    assert_eq!(huge_bytes(maps, 0x7f00_0100_0000), None);
    assert_eq!(huge_bytes(maps, 0x1000), None);
}

#[test]
fn settings_are_listed_and_a_wrong_one_is_missing() {
    assert_eq!(settings(vec![], Ok(())).status, Status::Ok);
    let set = settings(vec!["MEMFERRY_CMA=off".into(), "MEMFERRY_PATH=single".into()], Ok(()));
    assert_eq!(set.detail, "MEMFERRY_CMA=off MEMFERRY_PATH=single");
    let wrong = settings(vec!["MEMFERRY_CMA=perhaps".into()], Err("not valid".into()));
    assert_eq!((wrong.status, wrong.detail.as_str()), (Status::Missing, "not valid"));
}

#[test]
fn costs_that_were_not_measured_are_said_to_be_built_in() {
    let built_in = profile(Ok(MessageProfile::built_in()), None);
    assert_eq!(built_in.status, Status::Warn);
}

#[test]
fn costs_that_were_measured_on_a_busy_machine_are_not_ticked() {
    let origin = ProfileOrigin::Rejected("the machine was busy".into());
    let nothing = plan::Measurement::default();
    let busy = profile(Ok(MessageProfile::new(origin.clone(), nothing, nothing)), None);
    assert_eq!(busy.status, Status::Warn);
    assert!(busy.fix.unwrap().contains("memferry doctor --measure"));
    assert!(busy.detail.contains("busy") && busy.detail.contains("built-in"), "{}", busy.detail);
    let saved = MessageProfile::new(ProfileOrigin::Saved("there".into()), nothing, nothing);
    let older = profile(Ok(saved), Some(&origin));
    assert_eq!(older.status, Status::Warn);
    assert!(older.detail.contains("there stay in use"), "{}", older.detail);
}

#[test]
fn measured_costs_are_said_to_be_and_where() {
    let costs = plan::CorePairCosts::built_in(Locality::SharedCache).values().map(Some);
    let measured = plan::Measurement::new(costs);
    let origin = ProfileOrigin::Saved("there".into());
    let found = MessageProfile::new(origin, measured, plan::Measurement::default());
    let check = profile(Ok(found), Some(&ProfileOrigin::Measured));
    assert_eq!(check.status, Status::Ok);
    assert!(check.detail.contains("saved in there"), "{}", check.detail);
    assert!(check.detail.starts_with("160 ns from core to core"), "{}", check.detail);
}

#[test]
fn what_the_kernel_lacks_is_named_with_its_cure() {
    let refused = || io::Error::from_raw_os_error(libc::ENOSYS);
    assert!(futex_waitv(Err(refused())).fix.unwrap().contains("Linux 5.16"));
    assert_eq!(sealed_memory(Err(refused())).status, Status::Missing);
    assert_eq!(pidfd(Err(refused())).status, Status::Warn);
}
