module keyward.test/chains

go 1.26.0
